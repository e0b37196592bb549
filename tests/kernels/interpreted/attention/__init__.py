"""Kernels of attention in Triton's interpreter, and emulated."""
