"""What rank 0 sends to the other ranks: step plans, rows to sample, sealed messages."""
