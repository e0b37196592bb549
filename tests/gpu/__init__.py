"""Scripts that need a GPU: correctness and bits first, then times."""
