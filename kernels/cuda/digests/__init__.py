"""Digests of tensors where they lie, on a GPU."""
