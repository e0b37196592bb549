"""The step plan: what every rank runs in one step, as fixed-schema bytes.

Rank 0 makes plans; the other ranks check their seal (engine/control.py) and execute. Rows stand in
a total order (by admission number, then choice). A plan with no rows is a heartbeat.

Rows travel as columns (`PlanRows`): with hundreds of them in every step, an object a row would take
the host longer than a step takes the GPU.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain

import msgspec
import numpy as np

from tpdet.control.weight_orders import WeightOrder
from tpdet.errors import IntegrityError
from tpdet.kernels.inputs.plain_rows import pack_row
from tpdet.kernels.inputs.row_params import PlainParams
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS

PLAN_VERSION = 13
MAX_PLAN_BYTES = 64 << 20
DIGEST_BYTES = 32  # of the version table
MAX_STEP_DRAFTS = 1024  # drafts of all rows of a step, at most

ALLOCATE, EVICT, NAN, RELOAD, SHARE = 0, 1, 3, 4, 5
EVENT_NAMES = {ALLOCATE: "allocate", EVICT: "evict", NAN: "nan", RELOAD: "reload", SHARE: "share"}


class PageEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A change to one page, applied to every rank's version table in the order listed."""

    kind: int
    page: int
    version_id: int


CLEAR_STATE, COPY_STATE, ADVANCE_STATE, FREE_STATE = 0, 1, 2, 3
STATE_EVENT_NAMES = {
    CLEAR_STATE: "clear", COPY_STATE: "copy", ADVANCE_STATE: "advance", FREE_STATE: "free"
}  # fmt: skip


class StateEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A change to one slot of linear-attention states, applied before the plan's rows, in order.

    CLEAR_STATE: `slot` holds the states before position 0. COPY_STATE: it holds what `source` does,
    the states at the start of chunk `chunk`. ADVANCE_STATE: it holds those of `source`, which are
    at the chunk before, advanced by that chunk's rows; `source` stays as it is. These give the slot
    to `version_id`. FREE_STATE: nobody reads `slot`, of `version_id`, any more. What a kind has no
    use for is 0.
    """

    kind: int
    slot: int
    source: int
    chunk: int
    version_id: int


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence's part of a step.

    `token_ids` are computed at positions `start`, `start + 1`, ...; `pages[i]` holds positions
    256*i to 256*i+255 and `versions[i]` is the version the sequence was given it under. `logits`
    says for which of the row's last tokens logits are wanted (0: none, 1: the last one, n: the
    last n of the row). `samples` says of how many of its last logits a token is sampled: none, one,
    or `1 + k` in a row of `1 + k` token ids, the last `k` of which are drafts. A draft is a token
    that nobody has sampled: rank 0 keeps the tokens up to the first that differs from its draft.

    A negative token id `-1 - i` stands for the i-th token that the step before samples, in the
    order of its rows: a step is planned while that one still runs.

    `unverified`: drafts of the sequence in that step, whose first token is the one that the row's
    first id names. Where the first `a` of them are right, the row begins at position `start + a`,
    with that step's token there. Its other tokens are `expected[a + 1]` and those behind it:
    `expected` has the unverified drafts, the token expected behind them, and what may follow.
    `pages` hold the row wherever it begins.

    `slot` holds the sequence's states of linear-attention layers (-1: the model has none), which
    stand for the start of chunk `standing` before the step: the row's first chunk, or the one
    before. `snapshots`: (chunk, slot) of each snapshot that the row leaves behind: the states at
    the start of `chunk` go to `slot`. The row begins before that chunk, and ends behind it.
    """

    admission: int
    choice: int
    version_id: int
    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    versions: tuple[int, ...]
    logits: int
    samples: int = 0
    slot: int = -1
    standing: int = 0
    unverified: int = 0
    expected: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()


_NUMBERS = (
    "admission", "choice", "version_id", "start", "count", "held", "logits", "samples", "unverified"
)  # fmt: skip
"""The columns of `PlanRows.numbers`, each int64 [n] (version_id: uint64)."""
_STATES = ("slot", "standing")
"""The columns of `PlanRows.states`, each int64 [n]."""
_SNAPSHOTS = ("row", "chunk", "slot")
"""The columns of `PlanRows.snapshots`, each int64 [m]."""
_INT64, _INT32 = np.dtype("<i8"), np.dtype("<i4")


class PlanRows(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The rows of a plan by columns, as little-endian bytes; iterating makes `Row`s of them.

    `numbers` int64 [9, n] has a row's `_NUMBERS`: `count` token ids, `held` pages. The others are
    the rows' token ids (int64), pages (int32) and versions (int64), one row after another.
    `states` int64 [2, n] has a row's `_STATES`; empty for a model without linear attention.
    `expected` (int64) has `unverified + count` ids of each row behind unverified drafts.
    `snapshots` int64 [3, m] has the `_SNAPSHOTS` of all rows, row after row.
    """

    numbers: bytes
    token_ids: bytes
    pages: bytes
    versions: bytes
    states: bytes = b""
    expected: bytes = b""
    snapshots: bytes = b""

    @staticmethod
    def of(rows: Sequence[Row]) -> "PlanRows":
        """The columns of `rows`. Raises IntegrityError for a page without its version."""
        for row in rows:
            if len(row.pages) != len(row.versions):
                raise IntegrityError(
                    f"{row_name(row)} has {len(row.pages)} pages with {len(row.versions)} versions"
                )
        numbers = np.empty((len(_NUMBERS), len(rows)), _INT64)
        numbers[2].view(np.uint64)[:] = [row.version_id for row in rows]
        for place, column in (
            (0, [row.admission for row in rows]),
            (1, [row.choice for row in rows]),
            (3, [row.start for row in rows]),
            (4, [len(row.token_ids) for row in rows]),
            (5, [len(row.pages) for row in rows]),
            (6, [row.logits for row in rows]),
            (7, [row.samples for row in rows]),
            (8, [row.unverified for row in rows]),
        ):
            numbers[place] = column
        states = [[row.slot, row.standing] for row in rows]
        kept = [(index, *of) for index, row in enumerate(rows) for of in row.snapshots]
        return PlanRows(
            numbers.tobytes(),
            np.array([*chain.from_iterable(row.token_ids for row in rows)], _INT64).tobytes(),
            np.array([*chain.from_iterable(row.pages for row in rows)], _INT32).tobytes(),
            np.array([*chain.from_iterable(row.versions for row in rows)], _INT64).tobytes(),
            np.array(states, _INT64).T.tobytes() if any(row.slot >= 0 for row in rows) else b"",
            np.array([*chain.from_iterable(row.expected for row in rows)], _INT64).tobytes(),
            np.array(kept, _INT64).T.tobytes(),
        )

    def __len__(self) -> int:
        return len(self.numbers) // (len(_NUMBERS) * _INT64.itemsize)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    @cached_property
    def _columns(self) -> np.ndarray:
        return np.frombuffer(self.numbers, _INT64).reshape(len(_NUMBERS), len(self))

    @property
    def choice(self) -> np.ndarray:
        """Which of its request's answers it is of: int64 [n]."""
        return self._columns[1]

    @property
    def version_id(self) -> np.ndarray:
        """Who writes its pages: uint64 [n]."""
        return self._columns[2].view(np.uint64)

    @property
    def start(self) -> np.ndarray:
        """The first position: int64 [n]."""
        return self._columns[3]

    @property
    def count(self) -> np.ndarray:
        """How many tokens are computed: int64 [n]."""
        return self._columns[4]

    @property
    def held(self) -> np.ndarray:
        """How many pages it names: int64 [n]."""
        return self._columns[5]

    @property
    def logits(self) -> np.ndarray:
        """How many of its last tokens have logits: int64 [n]."""
        return self._columns[6]

    @property
    def samples(self) -> np.ndarray:
        """How many tokens it samples, more than one in a row with drafts: int64 [n]."""
        return self._columns[7]

    @property
    def unverified(self) -> np.ndarray:
        """How many drafts the step before verifies, behind which it begins: int64 [n]."""
        return self._columns[8]

    @cached_property
    def state_columns(self) -> np.ndarray:
        """Slot and standing of each row: int64 [2, n], or [2, 0] without states."""
        return np.frombuffer(self.states, _INT64).reshape(len(_STATES), -1)

    @cached_property
    def ids(self) -> np.ndarray:
        """The token ids of all rows: int64."""
        return np.frombuffer(self.token_ids, _INT64)

    @cached_property
    def page_ids(self) -> np.ndarray:
        """The pages of all rows: int32."""
        return np.frombuffer(self.pages, _INT32)

    @cached_property
    def page_versions(self) -> np.ndarray:
        """The versions of `page_ids`: int64."""
        return np.frombuffer(self.versions, _INT64)

    @cached_property
    def decodes(self) -> bool:
        """Whether each row, of one or more, is one token whose logits are wanted."""
        return len(self) > 0 and bool((self.count == 1).all() and (self.logits == 1).all())

    @cached_property
    def verifies(self) -> bool:
        """Whether each row samples at all its tokens, and one or more of them has drafts."""
        return len(self) > 0 and bool((self.samples == self.count).all() and self.count.max() > 1)

    @cached_property
    def _rows(self) -> tuple[Row, ...]:
        columns = self._columns.tolist()
        columns[2] = self.version_id.tolist()
        ids, pages = self.ids.tolist(), self.page_ids.tolist()
        versions, expected = self.page_versions.tolist(), expected_ids(self).tolist()
        states = self.state_columns.T.tolist() or [(-1, 0)] * len(self)
        kept: list[list[tuple[int, int]]] = [[] for _ in range(len(self))]
        for index, chunk, slot in snapshot_columns(self).T.tolist():
            kept[index].append((chunk, slot))
        rows: list[Row] = []
        token = page = known = 0
        for numbers, (slot, standing) in zip(zip(*columns, strict=True), states, strict=True):
            admission, choice, version_id, start, count, held, logits, samples, before = numbers
            behind = before + count if before else 0
            rows.append(
                Row(
                    admission,
                    choice,
                    version_id,
                    start,
                    tuple(ids[token : token + count]),
                    tuple(pages[page : page + held]),
                    tuple(versions[page : page + held]),
                    logits,
                    samples,
                    slot,
                    standing,
                    before,
                    tuple(expected[known : known + behind]),
                    tuple(kept[len(rows)]),
                )
            )
            token, page, known = token + count, page + held, known + behind
        return tuple(rows)


def expected_ids(rows: PlanRows) -> np.ndarray:
    """The expected ids of all rows behind unverified drafts, one row after another: int64."""
    return np.frombuffer(rows.expected, _INT64)


def snapshot_columns(rows: PlanRows) -> np.ndarray:
    """Row, chunk and slot of each snapshot that rows leave behind: int64 [3, m]."""
    return np.frombuffer(rows.snapshots, _INT64).reshape(len(_SNAPSHOTS), -1)


def settle_rows(rows: PlanRows, sampled: np.ndarray) -> tuple[PlanRows, np.ndarray]:
    """Rows where they begin by the step before, and by how many positions each moved: int64 [n].

    sampled: tokens of that step, int64.
    """
    numbers = np.frombuffer(rows.numbers, _INT64).reshape(len(_NUMBERS), -1).copy()
    ids, moved, expected = rows.ids.copy(), np.zeros(len(rows), np.int64), expected_ids(rows)
    firsts = np.cumsum(rows.count) - rows.count
    for row in np.flatnonzero(rows.unverified):
        first, count, unverified = firsts[row], rows.count[row], rows.unverified[row]
        token = -1 - ids[first]
        wrong = np.flatnonzero(sampled[token : token + unverified] != expected[:unverified])
        moved[row] = accepted = wrong[0] if len(wrong) else unverified
        ids[first] = sampled[token + accepted]
        ids[first + 1 : first + count] = expected[accepted + 1 : accepted + count]
        expected = expected[unverified + count :]
    numbers[_NUMBERS.index("start")] += moved
    numbers[_NUMBERS.index("unverified")] = 0
    columns = rows.pages, rows.versions, rows.states
    return PlanRows(numbers.tobytes(), ids.tobytes(), *columns), moved


def _check_rows(rows: PlanRows) -> None:
    """Refuse (IntegrityError) columns of lengths that do not fit each other."""
    whole, rest = divmod(len(rows.numbers), len(_NUMBERS) * _INT64.itemsize)
    if not rest:
        tokens = int(rows.count.sum()) if whole else 0
        pages = int(rows.held.sum()) if whole else 0
        lengths = len(rows.token_ids), len(rows.pages), len(rows.versions)
        expected = tokens * _INT64.itemsize, pages * _INT32.itemsize, pages * _INT64.itemsize
        sound = not whole or min(rows.count.min(), rows.held.min(), rows.samples.min()) >= 0
        sound &= len(rows.states) in (0, len(_STATES) * whole * _INT64.itemsize)
        behind = rows.unverified != 0
        ids = int((rows.unverified + rows.count)[behind].sum())
        sound &= len(rows.expected) == ids * _INT64.itemsize
        sound &= not behind.any() or (not rows.states and rows.count[behind].min() > 0)
        sound &= _names_rows(rows)
        ordered = (rows.samples <= rows.logits) & (rows.logits <= rows.count)
        if lengths == expected and sound and ordered.all():
            _check_drafts(rows)
            return
    raise IntegrityError(f"step plan does not fit its schema: columns of {whole} rows")


def _names_rows(rows: PlanRows) -> bool:
    """Whether snapshots are of rows that have states."""
    if not rows.snapshots:
        return True
    if not rows.states or len(rows.snapshots) % (len(_SNAPSHOTS) * _INT64.itemsize):
        return False
    row = snapshot_columns(rows)[0]
    return bool(row.min() >= 0 and row.max() < len(rows))


def _check_drafts(rows: PlanRows) -> None:
    """Refuse (IntegrityError) a row with drafts that has other tokens, and too many drafts."""
    drafted = (rows.samples > 1) | (rows.unverified != 0)
    if not drafted.any():
        return
    drafts = int(rows.samples[drafted].sum() - drafted.sum())
    firsts = np.cumsum(rows.count) - rows.count
    pending = rows.ids < 0
    unknown = pending[firsts[rows.unverified != 0]]
    pending[firsts[drafted]] = False
    of_drafted = np.repeat(drafted, rows.count)
    if (rows.samples != rows.count)[drafted].any() or pending[of_drafted].any():
        raise IntegrityError("step plan: a row with drafts is one token and its drafts")
    few = rows.unverified.min() >= 0 and rows.unverified.max() < SHORT_TOKENS
    if not few or not unknown.all():
        raise IntegrityError(
            f"step plan: a row behind up to {SHORT_TOKENS - 1} unverified drafts begins with "
            "their token"
        )
    if drafts > MAX_STEP_DRAFTS:
        raise IntegrityError(f"step plan of {drafts} drafts, over the cap of {MAX_STEP_DRAFTS}")


NO_ROWS = PlanRows(b"", b"", b"", b"")


def row_name(row: Row) -> str:
    """A row in a message."""
    return f"row (admission {row.admission}, choice {row.choice})"


class RowSampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the token after a row is sampled: what every rank needs of its `SamplingParams`.

    Position and choice are the plan row's. `logprobs`: how many of the likeliest tokens are
    reported beside it and its rank; None for neither.
    """

    seed: int
    params: PlainParams
    logprobs: int | None

    def packed(self, choice: int) -> bytes:
        """A row of it for `PlainRows`."""
        return pack_row(self.seed, choice, *self.params)


class WholeRows(
    msgspec.Struct, frozen=True, array_like=True, gc=False, tag=0, forbid_unknown_fields=True
):
    """Rank 0 samples every token, from whole rows of logits that the ranks gather."""


class LikeliestByColumns(
    msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1, forbid_unknown_fields=True
):
    """Every token is the likeliest; each rank looks for it in its part of the vocabulary."""


class ByColumns(
    msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2, forbid_unknown_fields=True
):
    """Each rank looks for every token in its part of the vocabulary; no row is filtered."""

    rows: tuple[RowSampling, ...]


class ByShares(
    msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3, forbid_unknown_fields=True
):
    """Each rank samples for its share of the rows, which an exchange makes whole for it."""

    rows: tuple[RowSampling, ...]


StepSampling = WholeRows | LikeliestByColumns | ByColumns | ByShares
"""How a step samples: one of four ways, each with its tag. No bit depends on which rank samples."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything a rank needs for one step.

    `table_digest` is the digest of the version table after `events` are applied. `stop` ends the
    worker loop cleanly after this plan. `feeds`: the next plan may name tokens that this one
    samples, so every rank learns them. `sampling` says who samples them. `weights`, in a plan
    without rows: what every rank does about its weights next, together with rank 0.
    `approximate`: by stock arithmetic; from the first plan that says so on, all do. `states` and
    `state_digest`: as `events` and `table_digest`, of the slots of linear-attention states; empty
    for a model without.
    """

    version: int
    step: int
    events: tuple[PageEvent, ...]
    rows: PlanRows
    table_digest: bytes
    stop: bool = False
    feeds: bool = False
    sampling: StepSampling = WholeRows()
    weights: WeightOrder | None = None
    approximate: bool = False
    states: tuple[StateEvent, ...] = ()
    state_digest: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepPlan)


def encode_plan(plan: StepPlan) -> bytes:
    """Bytes of a plan. Raises IntegrityError past the cap."""
    body = _encoder.encode(plan)
    if len(body) > MAX_PLAN_BYTES:
        raise IntegrityError(
            f"step plan of {len(body)} bytes is over the cap of {MAX_PLAN_BYTES}: lower "
            "--max-num-seqs or --max-num-batched-tokens"
        )
    return body


def decode_plan(data: bytes) -> StepPlan:
    """The plan in `data`, its length and schema checked. Raises IntegrityError."""
    if len(data) > MAX_PLAN_BYTES:
        raise IntegrityError(f"step plan of {len(data)} bytes is over the cap of {MAX_PLAN_BYTES}")
    try:
        plan = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise IntegrityError(f"step plan does not fit its schema: {error}") from error
    if plan.version != PLAN_VERSION:
        raise IntegrityError(f"step plan version {plan.version}; this rank runs {PLAN_VERSION}")
    _check_rows(plan.rows)
    return plan
