"""The steps of a draft model's call: the first by a plan, those behind it as a chain of graphs.

The first step has a plan, with page events and checks. The steps behind it compute the same rows,
each one position further, over pages that are taken already. So they run as links of a
`DecodeChain`: a link is begun where rows end, or where a row comes to its next page.
"""

from collections import abc
from functools import partial

import torch

from tpdet.cache.versions import VersionTable
from tpdet.control.row_messages import RowKey, SampledToken
from tpdet.errors import NumericalError
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.runner import LogitBlock
from tpdet.runner.graphs.decode_chain import ChainedSteps, DecodeChain
from tpdet.sampling.sampler import PendingSample, finish, sample_columns
from tpdet.scheduler.rows import plan_rows
from tpdet.scheduler.sequence import PENDING, Sequence

SHORT = 2
"""Tokens of each row of a short step: a copy lacks two after all of its drafts were right."""
Answers = abc.Callable[[], PendingSample]
"""What a step sampled, once no step of its link follows."""


class DraftStep:
    """One launched step: takes its logits, and writes what it sampled behind the copies' tokens."""

    event: torch.cuda.Event | None = None

    def __init__(
        self,
        copies: abc.Sequence[Sequence],
        counts: abc.Sequence[int],
        samples: abc.Sequence[int],
        answers: Answers | None = None,
        chain: DecodeChain | None = None,
    ) -> None:
        """Advance the copies by the step, which computes and samples so many tokens of each.

        answers: of a step that takes no logits. chain: may sample from those that a graph keeps.
        """
        self._answers, self._chain = answers, chain
        self.is_short, self.rows = max(counts) <= SHORT, len(counts)
        self._sequences: list[Sequence] = []
        self._ends: list[int] = []  # the position of each sampled token
        self._targets: list[tuple[Sequence, int, int]] = []  # a copy, its token's index, the sample
        self._pending: list[PendingSample] = []
        total = 0
        for copy, count, sampled in zip(copies, counts, samples, strict=True):
            copy.computed += count
            copy.drafted, total = 0, total + sampled
            if answers is None:
                self._sequences += [copy] * sampled
                self._ends += range(copy.computed - sampled + 1, copy.computed + 1)
            if sampled:
                copy.sample_index = total - 1
                self._targets.append((copy, len(copy.tokens), copy.sample_index))
                copy.tokens.append(PENDING)

    def take(self, block: LogitBlock) -> torch.Tensor:
        """Sample at each of the logits, fp32 [n, V]: ids int64 [n]."""
        first, logits, *_ = block
        sequences = self._sequences[first : first + len(logits)]
        packed = b"".join([it.packed_sampling for it in sequences])
        params = PlainRows(packed, self._ends[first : first + len(logits)])
        sample = None if self._chain is None else self._chain.sample(logits, params)
        if sample is None:
            shard = Shard(0, logits.shape[1])
            sample = sample_columns(logits, params, [None] * len(sequences), shard)
        self._pending.append(sample)
        return sample.tokens

    def write(self) -> None:
        """Write the sampled tokens into the copies. Raises NumericalError for NaN in the logits."""
        if self._answers is not None:
            self._pending.append(self._answers())
        samples = [it for pending in self._pending for it in finish(pending)]
        for copy, position, index in self._targets:
            token = samples[index]
            if not isinstance(token, SampledToken):
                raise NumericalError(f"{token.reason} of the draft model")
            copy.tokens[position] = token.token_id


class LaterSteps:
    """The steps of one call behind its first."""

    def __init__(self, chain: DecodeChain, table: VersionTable) -> None:
        """table: of the pages, after the events of all plans."""
        self._chain, self._table = chain, table
        self._keys: list[RowKey] = []
        self._link: ChainedSteps | None = None

    def launch(self, copies: abc.Sequence[Sequence]) -> DraftStep | None:
        """Launch a step of the next token of each copy, all of which sample; None: no graph fits.

        copies: in the order of their keys. Raises IntegrityError as `VersionTable.check_readers`.
        """
        keys = [copy.key for copy in copies]
        turns = any(copy.computed % PAGE_TOKENS == 0 for copy in copies)
        if self._link is None or turns or self._link.is_full or keys != self._keys:
            self._keys, self._link = keys, self._begin(copies)
        if self._link is None:
            return None
        ones = [1] * len(copies)
        return DraftStep(copies, ones, ones, partial(self._link.answers, self._link.step()))

    def end(self) -> None:
        """No step follows: what was sampled may go to the host."""
        if self._link is not None:
            self._link.copy_answers()

    def _begin(self, copies: abc.Sequence[Sequence]) -> ChainedSteps | None:
        rows = plan_rows(copies, [1] * len(copies))
        self._table.check_readers(rows)
        packed = b"".join([copy.packed_sampling for copy in copies])
        return self._chain.begin(rows, PlainRows(packed, [copy.computed + 1 for copy in copies]))
