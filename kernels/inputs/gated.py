"""How gate and up projections lie together: in turn, 8 rows of the one and 8 of the other.

A row of the feed-forward block's first product is [g_0 .. g_7, u_0 .. u_7, g_8 .. g_15, u_8 .. ].
Matrix instructions give a thread the columns j and j + 8, or the rows j and j + 8, of a block of
16: a gate and its up are then in one thread, whichever operand the weight is, so a kernel's
epilogue multiplies them where they are. The layout is the same for every tile, rank and leaf: a
rank's rows are a multiple of 16, because a leaf of the down projection is.
"""

import torch

GROUP = 8
"""Rows of a projection that lie together."""


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate and up [I, ...] -> [2 * I, ...]. Raises ValueError when 8 does not divide I."""
    if gate.shape != up.shape or gate.shape[0] % GROUP:
        raise ValueError(
            f"gate {tuple(gate.shape)} and up {tuple(up.shape)}: rows must be alike, and a "
            f"multiple of {GROUP}"
        )
    pairs = torch.stack([gate.unflatten(0, (-1, GROUP)), up.unflatten(0, (-1, GROUP))], dim=1)
    return pairs.flatten(0, 2)


def halves(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where gates and ups lie in an interleaved weight [2 * I, ...]: views [I / 8, 8, ...]."""
    pairs = weight.unflatten(0, (-1, 2, GROUP))
    return pairs[:, 0], pairs[:, 1]


def write_half(half: torch.Tensor, rows: torch.Tensor) -> None:
    """Write a projection's rows [I', ...] to its place of `halves` [I / 8, 8, ...], then zeros.

    Zeros follow where 8 does not divide I', as in small models alone.
    """
    whole, rest = divmod(len(rows), GROUP)
    half[:whole] = rows[: whole * GROUP].unflatten(0, (whole, GROUP))
    if rest:
        half[whole, :rest] = rows[whole * GROUP :]
        half[whole, rest:] = 0


def gate_and_up(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [M, 2 * I] of an interleaved product -> gate and up [M, I]."""
    gate, up = rows.unflatten(1, (-1, 2, GROUP)).unbind(2)
    return gate.flatten(1), up.flatten(1)
