"""Which rank a process is, and the commands that start ranks: torchrun, Slurm, MPI, our own."""
