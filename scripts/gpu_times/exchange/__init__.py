"""Times of exchanges between GPUs."""
