"""Values of 4 and 8 bits that lie packed in larger integers."""

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The value that each nibble of AWQ's int32 holds, from the lowest nibble on."""


def unpack(
    packed: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """int32 [A, B] -> unsigned values as int32, 32 / bits times as many along `dim`.

    The lowest bits hold the first value, or value `order[0]` of each int32.
    """
    each = 32 // bits
    places = [0] * each
    for nibble, value in enumerate(order or range(each)):
        places[value] = nibble * bits
    shifts = torch.tensor(places, dtype=torch.int32)
    values = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (1 - dim))) & ((1 << bits) - 1)
    return values.flatten(dim, dim + 1)
