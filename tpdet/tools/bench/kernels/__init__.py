"""Times of single kernels beside their floor and their peer."""
