"""What one verification covers, and what one world reports: plain data in JSON files."""

import msgspec

from tpdet.verify.ways import USUAL, Way


class VerifySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `tpdet verify` on one model.

    `relations`: names of tpdet.verify.relations; a world of `part` "steps" runs those of steps, one
    of "fresh" or "cache" those that need other processes. `way` is how the world is started.
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
    way: Way = USUAL

    @property
    def modes(self) -> tuple[str, ...]:
        """The contracts to verify: a name for each fold order, and "gather" without a fold."""
        folded = self.fold_orders if "fold" in self.row_layers else ()
        return folded + (("gather",) if "gather" in self.row_layers else ())


def mode_settings(mode: str) -> dict[str, str]:
    """What an engine must be told to run in a mode."""
    return {"row_layers": "gather"} if mode == "gather" else {"fold_order": mode}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a world ran: "cpu", or the GPU's name, how many of them, and their driver."""

    gpu: str = "cpu"
    gpus: int = 0
    driver: str | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What a world saw of its probes in one circumstance.

    `logits[probe][position]` is the SHA-256 of the fp32 logits of the whole vocabulary there;
    `values` names a file of those logits, position after position, in the same order (raw fp32).
    """

    dtype: str
    mode: str
    circumstance: str
    tokens: dict[str, tuple[int, ...]]
    logprob_bits: dict[str, tuple[str, ...]]
    logits: dict[str, dict[int, str]]
    values: str
    steps: int


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """How rank 0 found itself started: who by, on how many nodes, what carries tensors.

    `by_mpi`: which MPI, such as "mpi, staged", or "". `node_folds`: folds in two levels.
    """

    launcher: str
    nodes: int
    by_mpi: str
    node_folds: int


class WorldReport(msgspec.Struct, frozen=True, kw_only=True):
    """All traces of one tensor-parallel size, started in one way."""

    tp: int
    way: Way = USUAL
    seen: Seen | None = None
    vocab_size: int
    fingerprints: dict[str, str]
    traces: tuple[Trace, ...]
    machine: Machine
