"""Times of kernels on one GPU."""
