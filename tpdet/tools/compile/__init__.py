"""`tpdet compile`: the kernels of a start, compiled where there is no GPU."""
