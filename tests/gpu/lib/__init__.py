"""What the GPU checks and programs share: compared bytes, checks in processes, on ranks, times."""
