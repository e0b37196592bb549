"""Norms, folds, activations, embeddings and rotary embedding on torch CPU tensors."""
