"""Kernels of linear attention, compiled for Hopper without a GPU."""
