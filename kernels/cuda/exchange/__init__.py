"""Kernels that exchange words over peer memory: folds of sums, columns, rows."""
