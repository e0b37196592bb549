"""The life of processes: supervision, signals, the run directory, its secret, the end."""
