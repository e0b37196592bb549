"""Sums and columns exchanged between GPUs: programs for torchrun and mpirun."""
