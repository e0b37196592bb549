"""Kernels: the arithmetic of tpdet, each operation defined once. Imports torch and triton only."""
