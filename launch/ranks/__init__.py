"""Which rank a process is, and on which node, by what its launcher told it."""
