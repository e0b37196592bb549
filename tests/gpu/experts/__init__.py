"""The kernels of experts on a GPU: bits and times."""
