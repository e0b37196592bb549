"""Guesses which tensors are read next: a layer's are those of the layer before, one number on."""

import re

_LAYER = re.compile(r"(.*?\.layers\.)(\d+)(\..*)")


def of_next_layer(name: str) -> str | None:
    """The name of the same tensor in the next layer; None for a tensor of no layer."""
    found = _LAYER.fullmatch(name)
    return f"{found[1]}{int(found[2]) + 1}{found[3]}" if found else None
