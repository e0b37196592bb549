"""What the GPU checks share: compared bytes, checks in processes, on ranks."""
