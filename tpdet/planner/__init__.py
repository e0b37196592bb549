"""`tpdet plan`: memory, time and capacity of a model on GPUs that need not be there.

`fit` writes `constants/<gpu>.json` from measured results; everything else reads that file, the
model's configuration and `hardware`, which holds what nobody here measured. See docs/scaling.md.
"""
