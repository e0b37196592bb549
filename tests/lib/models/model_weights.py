"""Every tensor of a model, to be compared."""

import torch

from tpdet.kernels.inputs.norm import Norm


def weights_of(thing, path="", seen=None):
    """Every tensor below a model, by where it hangs."""
    seen = set() if seen is None else seen
    if isinstance(thing, torch.Tensor):
        return {path: thing}
    if id(thing) in seen:
        return {}
    seen.add(id(thing))
    inner = {}
    if isinstance(thing, list | tuple):
        inner = dict(enumerate(thing))
    elif isinstance(thing, Norm) or type(thing).__module__.startswith(
        ("tpdet.models", "tpdet.layers")
    ):
        inner = vars(thing)
    found = {}
    for name, value in inner.items():
        found |= weights_of(value, f"{path}.{name}", seen)
    return found
