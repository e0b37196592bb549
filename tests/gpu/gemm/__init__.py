"""Products, folds, norms and activations on a GPU: bits, and times beside cuBLAS."""
