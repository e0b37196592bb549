"""The step plan: what every rank runs in one step, as fixed-schema bytes.

Rank 0 makes plans; the other ranks check their seal (engine/control.py) and execute. Rows stand in
a total order (by admission number, then choice). A plan with no rows is a heartbeat.
"""

import msgspec

from tpdet.errors import IntegrityError

PLAN_VERSION = 6
MAX_PLAN_BYTES = 64 << 20
DIGEST_BYTES = 32  # of the version table

ALLOCATE, EVICT, NAN, RELOAD, SHARE = 0, 1, 3, 4, 5
EVENT_NAMES = {ALLOCATE: "allocate", EVICT: "evict", NAN: "nan", RELOAD: "reload", SHARE: "share"}


class PageEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A change to one page, applied to every rank's version table in the order listed."""

    kind: int
    page: int
    version_id: int


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence's part of a step.

    `token_ids` are computed at positions `start`, `start + 1`, ...; `pages[i]` holds positions
    256*i to 256*i+255 and `versions[i]` is the version the sequence was given it under. `logits`
    says for which of the row's last tokens logits are wanted (0: none, 1: the last one, n: the
    last n of the row). `samples` says that the last logits sample a token.

    A negative token id `-1 - i` stands for the i-th token that the step before samples, in the
    order of its rows: a step is planned while that one still runs.
    """

    admission: int
    choice: int
    version_id: int
    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    versions: tuple[int, ...]
    logits: int
    samples: bool = False


class RowSampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the token after a row is sampled: what every rank needs of its `SamplingParams`.

    Position and choice are the plan row's. `logprobs`: how many of the likeliest tokens are
    reported beside it and its rank; None for neither.
    """

    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logprobs: int | None

    @property
    def filtered(self) -> bool:
        """Whether top-k or top-p asks for the row as a whole."""
        return self.temperature != 0.0 and (self.top_k > 0 or self.top_p < 1.0)


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
    """Each rank looks for every token in its part of the vocabulary.

    `rows`: one for each row with logits, none of them filtered.
    """

    rows: tuple[RowSampling, ...]


class ByShares(
    msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3, forbid_unknown_fields=True
):
    """Each rank samples for its share of the rows, which an exchange makes whole for it.

    `rows`: one for each row with logits.
    """

    rows: tuple[RowSampling, ...]


StepSampling = WholeRows | LikeliestByColumns | ByColumns | ByShares
"""How a step samples: one of four ways, each with its tag. No bit depends on which rank samples."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything a rank needs for one step.

    `table_digest` is the digest of the version table after `events` are applied. `stop` ends the
    worker loop cleanly after this plan. `feeds`: the next plan may name tokens that this one
    samples, so every rank learns them. `sampling` says who samples them. `reload`, in a plan
    without rows: load the weights of this model (directory or hub name) in place of the present.
    `approximate`: by stock arithmetic; from the first plan that says so on, all do.
    """

    version: int
    step: int
    events: tuple[PageEvent, ...]
    rows: tuple[Row, ...]
    table_digest: bytes
    stop: bool = False
    feeds: bool = False
    sampling: StepSampling = WholeRows()
    reload: str = ""
    approximate: bool = False


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
    return plan
