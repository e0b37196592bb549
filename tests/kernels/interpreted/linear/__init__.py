"""Kernels of linear attention in Triton's interpreter."""
