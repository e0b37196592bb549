"""The life of a server's processes: signals, the run directory, its secret, the end."""
