"""Random weights for benchmarks: the same full weights at every tensor-parallel size."""

import blake3
import torch

_SCALE = 0.02


def draw_piece(
    seed: int,
    name: str,
    index: int,
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Piece `index` of tensor `name`: fp32 [*shape], a function of the arguments alone.

    Values are normal with standard deviation 0.02, around 1 for norm weights and around 0 for all
    others.
    """
    key = blake3.blake3(f"{seed}\0{name}\0{index}".encode()).digest(length=8)
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little") >> 1)
    values = torch.randn(shape, generator=generator, device=device).mul_(_SCALE)
    return values + 1.0 if name.endswith("norm.weight") else values
