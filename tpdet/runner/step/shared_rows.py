"""Ranks sample together: by shares of a step's rows or by columns; every rank gets the tokens.

By shares, an exchange turns the columns of logits that a rank has computed into some whole rows,
for which the rank samples: steps with top-k or top-p. By columns, each rank looks for every row's
token in its part of the vocabulary. What else a row's token depends on stands in the plan
(`RowSampling`). Rows that bias, penalties, forbidden ids or a schema change are not for this:
rank 0 samples all rows of a step that has one.
"""

from collections.abc import Callable, Iterable

import torch

from tpdet.comm.exchange.fold import RankExchange
from tpdet.comm.exchange.rows import RowExchange
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.control.plan import RowSampling, StepPlan
from tpdet.errors import IntegrityError
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.layers.partition import Partition
from tpdet.sampling.sampler import PendingSample, sample_columns, sample_shared

Blocks = Iterable[tuple[int, torch.Tensor]]
"""(first row, this rank's columns of logits from it on)"""
TakeShared = Callable[[int, torch.Tensor, "SharedRows"], torch.Tensor]

_LIKELIEST = RowParams(temperature=0.0, seed=0, position=0)
_PLAIN = RowParams(temperature=1.0, seed=0, position=0, min_p=0.01)
_FILTERED = RowParams(temperature=0.8, seed=0, position=0, top_k=20, top_p=0.9, min_p=0.01)
_BY_COLUMNS = (_LIKELIEST,), (_PLAIN,)
_BY_SHARES = *_BY_COLUMNS, (_FILTERED,), (_LIKELIEST, _FILTERED, _PLAIN)
"""What rows of a step, or of a rank's share of it, may be: kernels leave out what none needs."""


class SharedRows:
    """The rows of one plan that the ranks sample for together."""

    def __init__(self, plan: StepPlan, exchange: RowExchange, world: World, shard: Shard) -> None:
        """plan: with `row_sampling`, one for each of its rows with logits. shard: this rank's."""
        rows = [row for row in plan.rows if row.logits]
        self._params = [
            _params_of(how, row.start + len(row.token_ids), row.choice)
            for how, row in zip(plan.row_sampling, rows, strict=True)
        ]
        self._counts = [how.logprobs for how in plan.row_sampling]
        self._exchange, self._world, self._shard = exchange, world, shard
        self._by_columns = plan.shards

    def sample(self, first: int, logits: torch.Tensor) -> PendingSample:
        """This rank's columns fp32 [n, W] of the rows from `first` on; on every rank alike."""
        last = first + len(logits)
        params, counts = self._params[first:last], self._counts[first:last]
        if self._by_columns:
            return sample_columns(logits, params, counts, self._shard)
        return sample_shared(
            logits,
            params,
            counts,
            self._exchange,
            self._world.rank,
            self._world.size,
            self._shard.vocab_size,
        )


class RowSharing:
    """The ranks' way to sample together.

    `several`: there is another rank; `open`: plans may have `row_sampling`. Alike on every rank.
    """

    def __init__(
        self, exchange: RankExchange, partition: Partition, rows: int, open_rows: bool
    ) -> None:
        """rows: that are shared at once, at most; not `open_rows`: none. Collective."""
        world, vocab_size = partition.world, partition.config.vocab_size
        self._columns = partition.vocabulary_share * len(partition.mine)
        shard = Shard(world.rank * self._columns, vocab_size, exchange.all_gather)
        self.several, self.open = world.size > 1, open_rows
        self._given: tuple[RowExchange, World, Shard] | None = None
        if open_rows:
            self._given = exchange.open_rows(self._columns, rows), world, shard
        self._most = rows

    def take_all(self, plan: StepPlan, blocks: Blocks, take: TakeShared) -> list[torch.Tensor]:
        """`take` of every block, in pieces that the exchange has room for: ids int64 [n] each.

        Raises IntegrityError where nothing was opened.
        """
        if self._given is None:
            raise IntegrityError("the plan has ranks sample together: this rank was not started so")
        shared = SharedRows(plan, *self._given)
        return [
            take(first + skip, logits[skip : skip + self._most], shared)
            for first, logits in blocks
            for skip in range(0, len(logits), self._most)
        ]

    def warm_up(self, device: torch.device) -> None:
        """Sample for every number of rows that may compile something; collective."""
        if self._given is None:
            return
        exchange, world, shard = self._given
        rows = 1
        while rows:
            logits = torch.zeros(rows, self._columns, device=device)
            counts, size = [5] * rows, shard.vocab_size
            for kinds in _BY_SHARES:
                params = [kinds[i % len(kinds)] for i in range(rows)]
                sample_shared(logits, params, counts, exchange, world.rank, world.size, size)
            for (kind,) in _BY_COLUMNS:
                sample_columns(logits, [kind] * rows, counts, shard)
            rows = min(2 * rows, self._most) if rows < self._most else 0


def open_sharing(
    config: EngineConfig, exchange: RankExchange, partition: Partition, rows: int
) -> RowSharing:
    """For up to `rows` rows at once, if the configuration has ranks sample together. Collective."""
    asked = {"auto": exchange.memory is not None, "on": True, "off": False}[config.share_draws]
    several = partition.world.size > 1
    return RowSharing(exchange, partition, min(rows, config.seats), asked and several)


def _params_of(how: RowSampling, position: int, choice: int) -> RowParams:
    return RowParams(
        temperature=how.temperature,
        seed=how.seed,
        position=position,
        choice=choice,
        top_k=how.top_k,
        top_p=how.top_p,
        min_p=how.min_p,
    )
