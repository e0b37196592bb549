"""Mixture of experts on the GPU: router, sorted tokens, products of blocks of rows, lanes."""
