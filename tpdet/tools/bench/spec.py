"""The work of a benchmark's ranks, and their results, as plain data in JSON files."""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from tpdet.tools.bench.generate_load import Sizes
from tpdet.tools.measurement.rows import BenchRow
from tpdet.tools.worlds.machine import Machine, machine


class LatencySpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode steps of every batch at every context, then prompts of each `prefill_tokens`.

    settings: those of the engine that were given (`EngineConfig`); the others have its defaults.
    """

    module: ClassVar[str] = "latency"
    settings: dict[str, Any]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    prefill_tokens: tuple[int, ...]
    prefill_prompts: int


class MixedSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests submitted at once: random lengths, even from `shortest` to `longest`.

    settings: as of `LatencySpec`.
    """

    module: ClassVar[str] = "throughput"
    settings: dict[str, Any]
    requests: int
    shortest: int
    longest: int
    generate: int
    seed: int


class GenerateSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What `LLM.generate` is timed by; settings: the keywords of `LLM` that were given."""

    module: ClassVar[str] = "generate"
    settings: dict[str, Any]
    sizes: Sizes


class DraftsSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What drafters are timed by: synthetic ones at each batch, and texts where `texts` is set.

    settings: the keywords of `LLM` that were given. acceptance: chances that a synthetic draft is
    right. context, tokens: of each prompt and each answer. repeats: runs, of which the fastest
    counts.
    """

    module: ClassVar[str] = "drafts"
    settings: dict[str, Any]
    batches: tuple[int, ...]
    acceptance: tuple[float, ...]
    context: int
    tokens: int
    texts: bool
    repeats: int
    seed: int


class HostSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode steps of `batch` sequences, whose host's time is taken; the fields are flags."""

    module: ClassVar[str] = "host"
    model: str
    load_format: str
    device: str
    batch: int
    context: int
    steps: int
    temperature: float
    top_p: float

    @property
    def tokens(self) -> int:
        """Tokens of each answer: the first sequences decode while the last prompts are read."""
        return self.steps + -(-self.batch * self.context // 1024)


class ExchangeSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The exchange between ranks: outputs of `kilobytes` each, in rows of `hidden` bf16 values."""

    module: ClassVar[str] = "exchange"
    kilobytes: tuple[int, ...]
    hidden: int
    fold_order: str
    repeats: int
    timeout: float = 600.0


EngineSpec = LatencySpec | MixedSpec
Spec = EngineSpec | GenerateSpec | DraftsSpec | HostSpec | ExchangeSpec
"""`measure` of a spec's `module` does its work on a rank."""


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements of one world, its machine, and the cases left out, with reasons."""

    rows: tuple[BenchRow, ...]
    machine: Machine
    notes: tuple[str, ...] = ()


def result_of(
    rows: Sequence[BenchRow], device: str, ranks: int, notes: Sequence[str] = ()
) -> BenchResult:
    """The result of a world of `ranks` on this host's "cpu" or "cuda" (or "auto")."""
    return BenchResult(rows=tuple(rows), machine=machine(device, ranks), notes=tuple(notes))


def output_rows(kilobytes: int, hidden: int) -> int:
    """Rows of `hidden` bf16 values in an output of `kilobytes`, at least 1."""
    return max(1, kilobytes * 1024 // (2 * hidden))
