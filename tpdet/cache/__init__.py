"""The paged KV cache: its tensors, free pages, page versions and the prefix cache's index."""
