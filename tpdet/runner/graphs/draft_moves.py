"""Rows behind drafts that the step before verifies: they begin behind those that are right.

The host does not know how many are when it launches the rows. A kernel between both steps compares
that step's tokens with its drafts, and writes ids, positions and slots into the packed step that a
graph reads. Without a graph the host waits for the tokens, and makes the rows of them.
"""

import numpy as np
import torch

from tpdet.control.plan import PlanRows, expected_ids, settle_rows
from tpdet.kernels import ops
from tpdet.runner.graphs.packed_step import BatchParts


class DraftMoves:
    """How the rows of one step move.

    moved: by how many positions each of the step's M tokens did, int64 [M] on the device, once
    `settle` or `write` was called.
    """

    def __init__(self, rows: PlanRows, sampled: torch.Tensor) -> None:
        """sampled: the tokens of the step before, int64 on the device."""
        self._rows, self._sampled = rows, sampled
        self.moved = torch.empty(int(rows.count.sum()), dtype=torch.int64, device=sampled.device)

    def settle(self) -> PlanRows:
        """The rows where they begin, once the step before has run."""
        rows, moved = settle_rows(self._rows, self._sampled.cpu().numpy())
        self.moved.copy_(torch.from_numpy(np.repeat(moved, rows.count)))
        return rows

    def write(self, ids: torch.Tensor, parts: BatchParts) -> None:
        """Move the rows in a packed step on the device, whose first rows they are."""
        numbers = torch.from_numpy(move_numbers(self._rows))
        if ids.device.type == "cuda":
            numbers = numbers.pin_memory().to(ids.device, non_blocking=True)
        _follow(ids, parts, numbers, self._sampled, self.moved)


def rehearse_moves(ids: torch.Tensor, parts: BatchParts, sampled: torch.Tensor) -> None:
    """Launch what moves rows, of which none does, so that it is loaded."""
    numbers = torch.zeros(5, dtype=torch.int64, device=ids.device)
    _follow(ids, parts, numbers, sampled, torch.empty_like(numbers[:1]))


def _follow(
    ids: torch.Tensor,
    parts: BatchParts,
    numbers: torch.Tensor,
    sampled: torch.Tensor,
    moved: torch.Tensor,
) -> None:
    of = parts.positions, parts.slots, parts.spans, parts.tables
    ops.follow_drafts(ids, *of, numbers, sampled, moved)


def move_numbers(rows: PlanRows) -> np.ndarray:
    """What `ops.follow_drafts` reads of rows with M tokens: int64 [5 * M + ids expected]."""
    count, unverified = rows.count, rows.unverified
    firsts = np.cumsum(count) - count
    owner = np.repeat(np.arange(len(count)), count)
    behind = np.where(unverified > 0, unverified + count, 0)
    columns = np.arange(len(count)), unverified, -1 - rows.ids[firsts], np.cumsum(behind) - behind
    index = np.arange(len(owner)) - firsts[owner]
    return np.concatenate([*(column[owner] for column in columns), index, expected_ids(rows)])
