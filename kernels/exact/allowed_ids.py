"""Masks of the ids that a row may sample, as bits that travel from the host."""

from collections.abc import Sequence

import torch


def unpack_bits(masks: Sequence[bytes], device: torch.device) -> torch.Tensor:
    """Masks of one length, the lowest bit of a byte first: bool [masks, 8 * bytes]."""
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    return (packed.view(len(masks), -1, 1) & bits).ne(0).flatten(1)
