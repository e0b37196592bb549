"""How checkpoints store tensors, as the tensors of numbers that a model reads."""
