"""Kernels of attention, compiled for Hopper without a GPU."""
