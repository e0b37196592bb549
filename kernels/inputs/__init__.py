"""What operations are given besides tensors: paged batches, sampling parameters, shards."""
