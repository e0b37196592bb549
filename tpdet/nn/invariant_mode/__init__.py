"""A PyTorch model of others with the same bits alone and in any batch, operator by operator."""
