"""Starting ranks: our own, torchrun, Slurm, MPI and submitit, and the supervisor over them."""
