"""The planner's constants of one GPU, which `scripts/fit/planner.py` writes from measured results.

A cost tells the seconds of a kernel by its work, a formula that is also fitted to figures. Times
are in seconds, rates in bytes or operations a second.
"""

from functools import cache
from pathlib import Path

import msgspec

from tpdet.errors import UsageError
from tpdet.kernels.cuda.cost.roofline import roofline
from tpdet.kernels.inputs.activations import GATED_KINDS

FORMAT = 1
EXPERTS = "experts"
"""The cost of a layer's experts among those of products: both products, places, lanes, choice."""
FOLDER = Path(__file__).resolve().parent / "constants"


class ProductCost(msgspec.Struct, frozen=True):
    """A matrix product: launch, smooth maximum of reading and computing, and its activations."""

    launch: float
    bytes: float
    flops: float
    sharpness: float
    activations: float

    def seconds(self, work: tuple[float, float, float]) -> float:
        """Seconds of a product, or a layer's experts: bytes of weights, operations, other bytes."""
        weight, flops, activations = work
        reading, computing = weight / self.bytes, flops / self.flops
        rest = activations / self.activations
        return float(roofline(self.launch, computing, reading, rest, self.sharpness))


class DecodeAttentionCost(msgspec.Struct, frozen=True):
    """One layer's decode attention: launch, reading of keys and values, work of heads and splits.

    head: for each key head of each sequence; split: for each 256 tokens of the longest sequence.
    """

    launch: float
    bytes: float
    head: float
    split: float

    def seconds(self, work: tuple[float, float, float]) -> float:
        """Seconds of the bytes, heads and splits that `decode_attention_work` counts."""
        cached, heads, splits = work
        return self.launch + cached / self.bytes + heads * self.head + splits * self.split


class PrefillAttentionCost(msgspec.Struct, frozen=True):
    """One layer's prefill attention; flops counts only scores that the mask leaves visible."""

    launch: float
    flops: float

    def seconds(self, flops: float) -> float:
        """Seconds of a step of `flops` operations on visible keys."""
        return self.launch + flops / self.flops


class LinearCost(msgspec.Struct, frozen=True):
    """One layer's linear attention without its products: launches, states, rows, chunks in turn.

    bytes: a second, of states that decode rows read; rows: a second, of what the convolution and
    the factors of prompts' rows move; chunk: seconds of the pass over a chunk, of all heads of
    which a multiprocessor has one part of the columns.
    """

    launch: float
    bytes: float
    rows: float
    chunk: float

    def seconds(self, work: tuple[float, float, float]) -> float:
        """Seconds of the work that `linear_decode_work` or `linear_prefill_work` counts."""
        states, rows, turns = work
        return self.launch + states / self.bytes + rows / self.rows + turns * self.chunk


class ExchangeCost(msgspec.Struct, frozen=True):
    """One exchange: launch, time for each further peer, bytes a second that leave a GPU."""

    launch: float
    peer: float
    bytes: float

    def seconds(self, ranks: int, sent: float) -> float:
        """Seconds of an exchange in which each of `ranks` sends `sent` bytes."""
        return self.launch + self.peer * (ranks - 1) + sent / self.bytes


class SamplingCost(msgspec.Struct, frozen=True):
    """Greedy sampling: launch, extra time of several ranks, reading of a rank's fp32 logits."""

    launch: float
    ranks: float
    bytes: float

    def seconds(self, ranks: int, rows: int, columns: int) -> float:
        """Seconds of sampling `rows` rows, from `columns` fp32 logits of a rank."""
        return self.launch + (self.ranks if ranks > 1 else 0.0) + rows * columns * 4 / self.bytes


class LayerCost(msgspec.Struct, frozen=True):
    """The rest of a layer (rotation, stores, gaps): seconds a layer, and bytes moved.

    saved: seconds a layer that its products are faster in a step, where launches are dependent,
    than when timed alone; `seconds` is then 0.
    """

    seconds: float
    bytes: float
    saved: float = 0.0


class OverlapCost(msgspec.Struct, frozen=True):
    """An exchange that overlaps products: bytes a second that one of its programs sends."""

    program: float
    sharpness: float


class MeasuredFile(msgspec.Struct, frozen=True):
    """A file that constants come from, and the commits of the runs used."""

    file: str
    commits: tuple[str, ...]


class FitError(msgspec.Struct, frozen=True):
    """The error of a formula: the number of figures, and the relative error (rms and worst)."""

    figures: int
    rms: float
    worst: float


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All constants of one GPU. host: seconds of rank 0's CPU work for each decoded row.

    linear: None where it was not measured.
    """

    format: int
    gpu: str
    sources: tuple[MeasuredFile, ...]
    products: dict[str, ProductCost]
    decode_attention: DecodeAttentionCost
    prefill_attention: PrefillAttentionCost
    one_shot: ExchangeCost
    two_shot: ExchangeCost
    library_gather: ExchangeCost
    sampling: SamplingCost
    layer: LayerCost
    overlapped: OverlapCost
    host: float
    errors: dict[str, FitError]
    linear: LinearCost | None = None

    def product(self, kind: str) -> ProductCost:
        """The cost of a kind of product; of a gated one that was not fitted, another's."""
        if kind in GATED_KINDS and kind not in self.products:
            kind = "gated" if "gated" in self.products else "column"
        return self.products[kind]


@cache
def load_constants(gpu: str, folder: Path = FOLDER) -> Constants:
    """The constants of a GPU such as "h200". Raises UsageError naming the known GPUs."""
    known = sorted(path.stem for path in folder.glob("*.json"))
    if gpu not in known:
        raise UsageError(
            f"--gpu {gpu}: not measured, use {', '.join(known)}, or measure it (tpdet bench, "
            "tpdet tune) and run python -m scripts.fit.planner"
        )
    path = folder / f"{gpu}.json"
    try:
        constants = msgspec.json.decode(path.read_bytes(), type=Constants)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} holds no constants ({error}): write it anew") from error
    if constants.format != FORMAT:
        raise UsageError(f"{path} has format {constants.format}, not {FORMAT}: write it anew")
    return constants
