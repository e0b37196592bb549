"""Values of 4 and 8 bits that lie packed in larger integers."""

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The value that each nibble of AWQ's int32 holds, from the lowest nibble on."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(
    packed: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """int32 [A, B] -> unsigned values as fp32, 32 / bits times as many along `dim`.

    The lowest bits hold the first value, or value `order[0]` of each int32.
    """
    each = 32 // bits
    places = [0] * each
    for nibble, value in enumerate(order or range(each)):
        places[value] = nibble * bits
    shifts = torch.tensor(places, dtype=torch.int32)
    values = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (1 - dim))) & ((1 << bits) - 1)
    return values.flatten(dim, dim + 1).float()


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [A, B] -> values e2m1 as fp32 [A, 2 B]; the low nibble is the first."""
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    byte = torch.arange(256)
    pairs = torch.stack([table[byte & 15], table[byte >> 4]], -1).view(torch.int64)[:, 0]
    return pairs[packed.int()].view(torch.float32)
