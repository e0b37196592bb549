"""`tpdet plan`: predicts memory, time and capacity of a model on GPUs, without these GPUs.

`fit` writes `constants/<gpu>.json` from measured results. Everything else reads that file, the
model's configuration, and `hardware`, which has data sheets' figures and assumptions. See
docs/scaling.md.
"""
