"""The later steps of a draft model's call, each of one token of every copy.

The first step has a plan, with page events and checks. The steps behind it compute the same rows,
each one position further, over pages that are taken already. So they run as links of a
`DecodeChain`: a link is begun where rows end, or where a row comes to its next page.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

from tpdet.cache.versions import VersionTable
from tpdet.control.row_messages import RowKey
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.runner.graphs.decode_chain import ChainedSteps, DecodeChain
from tpdet.sampling.sampler import PendingSample
from tpdet.scheduler.rows import plan_rows
from tpdet.scheduler.sequence import Sequence

Answers = Callable[[], PendingSample]
"""What a step sampled, once no step of its link follows."""


class LaterSteps:
    """Of one call."""

    def __init__(self, chain: DecodeChain, table: VersionTable) -> None:
        """table: of the pages, after the events of all plans."""
        self._chain, self._table = chain, table
        self._keys: list[RowKey] = []
        self._link: ChainedSteps | None = None

    def launch(self, copies: Rows[Sequence]) -> Answers | None:
        """Launch a step of the next token of each copy, all of which sample; None: no graph fits.

        copies: in the order of their keys. Raises IntegrityError as `VersionTable.check_readers`.
        """
        keys = [copy.key for copy in copies]
        turns = any(copy.computed % PAGE_TOKENS == 0 for copy in copies)
        if self._link is None or turns or self._link.is_full or keys != self._keys:
            self._keys, self._link = keys, self._begin(copies)
        if self._link is None:
            return None
        return partial(self._link.answers, self._link.step())

    def end(self) -> None:
        """No step follows: what was sampled may go to the host."""
        if self._link is not None:
            self._link.copy_answers()

    def _begin(self, copies: Rows[Sequence]) -> ChainedSteps | None:
        rows = plan_rows(copies, [1] * len(copies))
        self._table.check_readers(rows)
        packed = b"".join([copy.packed_sampling for copy in copies])
        return self._chain.begin(rows, PlainRows(packed, [copy.computed + 1 for copy in copies]))
