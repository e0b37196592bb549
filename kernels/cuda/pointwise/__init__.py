"""Norms, folds, activations, embeddings and rotary embedding: one program a row or a tile."""
