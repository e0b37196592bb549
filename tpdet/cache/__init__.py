"""The paged KV cache: which pages are free, who owns each, and under which version."""
