"""The first operation whose bits differ between two sizes, or two runs of one, rank by rank."""

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from tpdet.client.engine_settings import engine_config
from tpdet.config import EngineConfig
from tpdet.tools.diff.operations import STEP_TOKENS, TracedOperation
from tpdet.tools.diff.rank import ASKED, AskedTrace, RankTrace
from tpdet.tools.worlds.worlds import run_world

_SETTINGS = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "drafts": "off",
    "draft_model": None,
    "max_num_batched_tokens": STEP_TOKENS,
    "max_num_seqs": 1,
}
"""Under these every operation runs one by one, over all tokens."""

Operations = Sequence[TracedOperation]
Ranks = Sequence[Operations]
"""The operations of each rank."""


class Located(msgspec.Struct, frozen=True):
    """What two traces say of each other.

    operation: the first that differs, None if none does; ranks: those of the second trace on which
    it does; behind: the last equal one that was compared before it; compared, operations: how many
    of the second trace's could be compared, of how many.
    """

    operation: str | None
    ranks: tuple[int, ...]
    behind: str | None
    compared: int
    operations: int

    def __str__(self) -> str:
        extent = f"{self.compared} of {self.operations} operations could be compared"
        if self.operation is None:
            return f"no operation differs: this machine computes both alike; {extent}"
        ranks = ", ".join(map(str, self.ranks)) or "unknown"
        return (
            f"the first operation that differs is {self.operation}, on rank {ranks}; the last "
            f"equal one before it is {self.behind or 'none'}; {extent}"
        )


def trace(
    options: argparse.Namespace, token_ids: Sequence[int], sizes: Sequence[int]
) -> list[list[RankTrace]]:
    """What each rank computes behind some ids, at each size, by the settings in options."""
    asked = engine_config(options, os.environ)
    values = asked.model_dump(include=asked.model_fields_set) | _SETTINGS
    settings = EngineConfig.from_values(**values).model_dump()
    traces = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="tpdet-trace-") as name:
            folder = Path(name)
            request = AskedTrace(settings, tuple(token_ids))
            (folder / ASKED).write_bytes(msgspec.json.encode(request))
            run_world(size, "tpdet.tools.diff.rank", [name], folder)
            files = [folder / f"rank{rank}.json" for rank in range(size)]
            traces.append([msgspec.json.decode(f.read_bytes(), type=RankTrace) for f in files])
    return traces


def locate(first: Ranks, second: Ranks) -> Located:
    """Hold the second trace against the first, in the order in which its rank 0 computed.

    At one size, rank by rank by the digests of whole outputs. At two sizes by the last row: ranks
    that all have as many values as the first trace's have copies of them, and ranks that have as
    many in all have parts of them. Others cannot be compared.
    """
    ours = [{one.key: one for one in rank} for rank in first]
    theirs = [{one.key: one for one in rank} for rank in second]
    behind, compared = None, 0
    for one in second[0]:
        left = [rank[one.key] for rank in ours if one.key in rank]
        right = [rank[one.key] for rank in theirs if one.key in rank]
        if (len(left), len(right)) != (len(first), len(second)):
            continue
        ranks = _ranks_of_one_size(left, right) if len(left) == len(right) else _ranks(left, right)
        if ranks is None:
            continue
        compared += 1
        if ranks:
            return Located(str(one), ranks, behind, compared, len(second[0]))
        behind = str(one)
    return Located(None, (), behind, compared, len(second[0]))


def _ranks_of_one_size(
    left: Sequence[TracedOperation], right: Sequence[TracedOperation]
) -> tuple[int, ...]:
    pairs = enumerate(zip(left, right, strict=True))
    return tuple(rank for rank, (one, other) in pairs if one.digest != other.digest)


def _ranks(
    left: Sequence[TracedOperation], right: Sequence[TracedOperation]
) -> tuple[int, ...] | None:
    """The ranks of `right` on which the last row differs; None where it cannot be compared."""
    sizes = {len(one.last_row) for one in (*left, *right)}
    if len(sizes) == 1:
        return tuple(i for i, one in enumerate(right) if one.last_row != left[0].last_row)
    whole = b"".join(one.last_row for one in left)
    if len(whole) != sum(len(one.last_row) for one in right):
        return None
    known = _counted(whole, left[0].width)
    parts = [_counted(one.last_row, one.width) for one in right]
    wrong = tuple(rank for rank, part in enumerate(parts) if part - known)
    return wrong or (() if sum(parts, Counter()) == known else tuple(range(len(right))))


def _counted(row: bytes, width: int) -> Counter[int]:
    """How often each value is there."""
    values, counts = np.unique(np.frombuffer(row, f"u{width}"), return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
