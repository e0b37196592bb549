"""Times of the whole engine on GPUs: starts, steps, drafts, what readers feel."""
