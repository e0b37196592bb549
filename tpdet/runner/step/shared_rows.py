"""Sampling together: by shares of a step's rows or by columns, and all ranks learn the tokens.

By shares, an exchange turns the columns of logits that a rank has computed into some whole rows,
and the rank samples for these: steps with top-k or top-p. By columns, each rank looks for every
row's token in its part of the vocabulary. The plan says what else a token depends on
(`RowSampling`). It has no lists of ids: rank 0 samples alone where a row of the step has a bias,
penalties, forbidden ids or a schema.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from tpdet.comm.exchange.fold import RankExchange
from tpdet.comm.exchange.rows import RowExchange, open_row_exchange
from tpdet.config import EngineConfig
from tpdet.control.plan import (
    ByColumns,
    ByShares,
    LikeliestByColumns,
    StepPlan,
    WholeRows,
)
from tpdet.errors import IntegrityError
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.layers.partition import Partition
from tpdet.sampling.sampler import (
    PendingSample,
    sample_columns,
    sample_likeliest,
    sample_shared,
)

Blocks = Iterable[tuple[int, torch.Tensor]]
"""(first row, this rank's columns of logits from it on)"""
SampleTogether = Callable[[int, torch.Tensor, torch.Tensor | None], PendingSample]
"""Samples for rows of one plan, on every rank alike.

From the step's first row of a block, this rank's columns of it, fp32 [n, W], and by how much the
positions of their tokens are moved, int64 [n] on the device (None: they are not).
"""

_LIKELIEST = RowParams(temperature=0.0, seed=0, position=0)
_PLAIN = RowParams(temperature=1.0, seed=0, position=0, min_p=0.01)
_FILTERED = RowParams(temperature=0.8, seed=0, position=0, top_k=20, top_p=0.9, min_p=0.01)
_BY_COLUMNS = (_LIKELIEST,), (_PLAIN,)
_BY_SHARES = *_BY_COLUMNS, (_FILTERED,), (_LIKELIEST, _FILTERED, _PLAIN)
"""What rows of a step, or of a rank's share of it, may be: kernels leave out what none needs."""


class RowSharing:
    """How the ranks sample together.

    `several`: there is another rank; `open`: plans may sample `ByColumns` and `ByShares`. Alike on
    every rank.
    """

    def __init__(
        self,
        exchange: RankExchange,
        partition: Partition,
        rows: int,
        open_rows: bool,
        processed: bool = False,
    ) -> None:
        """rows: that are shared at once, at most; not `open_rows`: none. Collective.

        processed: log-probabilities are of what is sampled from (`sampling/sampler.py`).
        """
        world, vocab_size = partition.world, partition.config.vocab_size
        self._columns = partition.vocabulary_share * len(partition.mine)
        self._world = world
        self._shard = Shard(world.rank * self._columns, vocab_size, exchange.carrier.all_gather)
        self.several, self.open = world.size > 1, open_rows
        self._rows: RowExchange | None = None
        if open_rows:
            self._rows = open_row_exchange(exchange.carrier, self._columns, rows)
        self._most, self._processed = rows, processed

    def follow(self, plan: StepPlan) -> SampleTogether | None:
        """How this rank samples with the others by a plan; None where rank 0 samples alone.

        Raises IntegrityError where nothing was opened for it.
        """
        how = plan.sampling
        if isinstance(how, WholeRows):
            return None
        if isinstance(how, LikeliestByColumns):
            return lambda first, logits, moved: sample_likeliest(logits, self._shard)
        if self._rows is None:
            raise IntegrityError("the plan has ranks sample together: this rank was not started so")
        exchange, world, size = self._rows, self._world, self._shard.vocab_size
        rows = plan.rows
        counted = rows.logits[rows.logits > 0]
        # Rows with drafts sample at each of their logits.
        of = zip(how.rows, rows.choice[rows.logits > 0].tolist(), counted.tolist(), strict=True)
        packed = b"".join([one.packed(choice) * n for one, choice, n in of])
        after = np.repeat(np.cumsum(rows.logits), rows.logits) - np.arange(counted.sum()) - 1
        params = PlainRows(packed, np.repeat(rows.start + rows.count, rows.logits) - after)
        each = zip(how.rows, counted.tolist(), strict=True)
        counts = [one.logprobs for one, n in each for _ in range(n)]

        def by_columns(
            first: int, logits: torch.Tensor, moved: torch.Tensor | None
        ) -> PendingSample:
            block = slice(first, first + len(logits))
            rows = params[block].moved_by(moved), counts[block], self._shard
            return sample_columns(logits, *rows, self._processed)

        def by_shares(
            first: int, logits: torch.Tensor, moved: torch.Tensor | None
        ) -> PendingSample:
            block = slice(first, first + len(logits))
            of = (
                params[block].moved_by(moved),
                counts[block],
                exchange,
                world.rank,
                world.size,
                size,
            )
            return sample_shared(logits, *of, self._processed)

        return by_columns if isinstance(how, ByColumns) else by_shares

    def cut(self, plan: StepPlan, blocks: Blocks) -> Blocks:
        """The blocks in pieces that the exchange of a plan's way of sampling has room for."""
        if not isinstance(plan.sampling, ByColumns | ByShares):
            yield from blocks
            return
        for first, logits in blocks:
            for skip in range(0, len(logits), self._most):
                yield first + skip, logits[skip : skip + self._most]

    def warm_up(self, device: torch.device) -> None:
        """Sample for every number of rows that may compile something; collective."""
        if self._rows is None:
            return
        exchange, world, shard = self._rows, self._world, self._shard
        rows = 1
        while rows:
            logits = torch.zeros(rows, self._columns, device=device)
            counts, size = [5] * rows, shard.vocab_size
            for processed in (False, True) if self._processed else (False,):
                for kinds in _BY_SHARES:
                    params = [kinds[i % len(kinds)] for i in range(rows)]
                    of = params, counts, exchange, world.rank, world.size, size
                    sample_shared(logits, *of, processed)
                for (kind,) in _BY_COLUMNS:
                    sample_columns(logits, [kind] * rows, counts, shard, processed)
            rows = min(2 * rows, self._most) if rows < self._most else 0


def open_sharing(
    config: EngineConfig, exchange: RankExchange, partition: Partition, rows: int
) -> RowSharing:
    """For up to `rows` rows at once, if the configuration has ranks sample together. Collective."""
    peers = exchange.carrier.memory is not None
    asked = {"auto": peers, "on": True, "off": False}[config.share_draws]
    several = partition.world.size > 1
    return RowSharing(
        exchange,
        partition,
        min(rows, config.max_running),
        asked and several,
        config.processes_logprobs,
    )
