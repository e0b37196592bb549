"""Operands on which variants of a product are compared: where another order of addition shows.

random: normal; its second row is -0.0. heavy: magnitudes over many powers of two. cancelling:
neighbouring products cancel but for their last bits. A weight repeats its first rows, so that the
reference need be computed for those only, while a library meets the true number of columns.
"""

import torch

KINDS = ("random", "heavy", "cancelling")
BASE_ROWS = 2048  # random rows of a weight; the others repeat them
_SEED = 20_251_121


def trial_rows(kind: str, rows: int, k: int, device: torch.device) -> torch.Tensor:
    """x [rows, k] in bf16; fewer rows of it are the operand of a smaller product."""
    x = _draw(kind, rows, k, device, _SEED)
    if kind == "cancelling":
        x[:, 1::2] = -x[:, ::2]
    if kind == "random":
        x[1:2] = -0.0
    return x.to(torch.bfloat16)


def trial_weight(kind: str, n: int, k: int, device: torch.device) -> torch.Tensor:
    """A weight [n, k] in bf16 whose rows repeat after BASE_ROWS."""
    base = min(n, BASE_ROWS)
    w = _draw(kind, base, k, device, _SEED + 1)
    if kind == "cancelling":
        jitter = torch.rand(base, k // 2, generator=_generator(device, _SEED + 2), device=device)
        w[:, 1::2] = w[:, ::2] * (1 + 2**-7 * (jitter < 0.5))
    return w.to(torch.bfloat16).repeat(-(-n // base), 1)[:n]


def differs(y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Whether y [m, n] has other bytes than wanted [m, base] repeated; a bool on the device."""
    kind = torch.int16 if y.element_size() == 2 else torch.int32
    y, wanted = y.contiguous().view(kind), wanted.contiguous().view(kind)
    base = wanted.shape[1]
    whole = y.shape[1] // base * base
    found = (y[:, :whole].unflatten(1, (-1, base)) != wanted[:, None, :]).any()
    return found | (y[:, whole:] != wanted[:, : y.shape[1] - whole]).any()


def _draw(kind: str, rows: int, k: int, device: torch.device, seed: int) -> torch.Tensor:
    generator = _generator(device, seed)
    x = torch.randn(rows, k, generator=generator, device=device)
    if kind == "heavy":
        x *= torch.randn(rows, k, generator=generator, device=device).mul_(3).exp_()
    return x


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
