"""Models that nobody trained: random checkpoints, their tokenizer, shapes of known models."""
