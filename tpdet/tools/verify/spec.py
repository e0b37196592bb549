"""The specification of a verification and the report of a world: plain data in JSON files."""

import msgspec

from tpdet.checkpoint.model_config.pooling import Task
from tpdet.tools.worlds.machine import Machine
from tpdet.tools.worlds.ways import USUAL, LaunchWay


class VerifySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `tpdet verify` on one model.

    `relations` are names of `tools/verify/relations.py`. A world whose `part` is "steps" runs those
    of steps, a world of "fresh" or "cache" those with other processes. `way`: how it is started.
    `draft_model`: the directory of one, for the relation of draft models. `task`: what the model
    answers, as of an engine. `kv_cache_dtype`: of its pages, likewise.
    """

    model: str
    dtypes: tuple[str, ...]
    fold_orders: tuple[str, ...]
    batches: tuple[int, ...]
    budgets: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    tokens: int
    seed: int
    control: bool
    load_format: str = "auto"
    device: str = "auto"
    row_layers: tuple[str, ...] = ("fold",)
    relations: tuple[str, ...] = ("alone",)
    part: str = "steps"
    step_timeout: float = 300.0
    leaves: int | None = None
    way: LaunchWay = USUAL
    draft_model: str | None = None
    task: Task = "auto"
    kv_cache_dtype: str = "auto"

    @property
    def modes(self) -> tuple[str, ...]:
        """The contracts to verify: the fold orders, and "gather" for none."""
        folded = self.fold_orders if "fold" in self.row_layers else ()
        return folded + (("gather",) if "gather" in self.row_layers else ())


def mode_settings(mode: str) -> dict[str, str]:
    """The settings of an engine that runs in `mode`."""
    return {"row_layers": "gather"} if mode == "gather" else {"fold_order": mode}


class Drafted(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts of an engine's own drafter, and how many were accepted.

    some_right, some_wrong: whether that must be so of any, for the trace to show something.
    """

    drafts: int
    accepted: int
    some_right: bool = True
    some_wrong: bool = True

    @property
    def shows(self) -> bool:
        """Whether there were drafts as there must be."""
        right, wrong = self.accepted > 0, self.accepted < self.drafts
        return self.drafts > 0 and right >= self.some_right and wrong >= self.some_wrong


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a world's probes in one circumstance.

    Of pooled prompts `logprob_bits` has the values of the answer, and there are no tokens.

    `logits[probe][position]` is the SHA-256 of the fp32 logits of the whole vocabulary there.
    `values` names a file with these logits (raw fp32), position after position. `texts` names the
    probes: a trace is compared with the first one of the same. `drafted`: where a drafter of the
    engine was to draft. Not `scored`: of prompts it has the logits of the last position alone.
    """

    dtype: str
    mode: str
    circumstance: str
    tokens: dict[str, tuple[int, ...]]
    logprob_bits: dict[str, tuple[str, ...]]
    logits: dict[str, dict[int, str]]
    values: str
    steps: int
    texts: str = ""
    drafted: Drafted | None = None
    scored: bool = True


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """How rank 0 was started: by which launcher, on how many nodes, and what carries tensors.

    `by_mpi`: the MPI that does, such as "mpi, staged", or "". `node_folds`: two-level folds so far.
    """

    launcher: str
    nodes: int
    by_mpi: str
    node_folds: int


class WorldReport(msgspec.Struct, frozen=True, kw_only=True):
    """All traces of one tensor-parallel size, started in one way; what was left out, and why.

    part, seconds: which of the relations the world ran, and how long; who started it fills them in.
    """

    tp: int
    way: LaunchWay = USUAL
    seen: Seen | None = None
    vocab_size: int
    fingerprints: dict[str, str]
    traces: tuple[Trace, ...]
    machine: Machine
    left_out: tuple[str, ...] = ()
    part: str = ""
    seconds: float = 0.0
