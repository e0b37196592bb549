"""Reads GGUF files as checkpoints: their header, configuration, tokenizer and tensors."""
