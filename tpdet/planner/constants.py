"""The planner's constants of one GPU, as `tpdet.planner.fit` wrote them from measured results.

Times are seconds, rates bytes or operations a second.
"""

from functools import cache
from pathlib import Path

import msgspec

from tpdet.errors import UsageError

FORMAT = 1
FOLDER = Path(__file__).resolve().parent / "constants"


class ProductCost(msgspec.Struct, frozen=True):
    """Of a matrix product: launch + smooth maximum of reading and computing + its activations."""

    launch: float
    bytes: float
    flops: float
    sharpness: float
    activations: float


class DecodeAttentionCost(msgspec.Struct, frozen=True):
    """Of one layer's decode attention: launch, keys and values read, work of heads and splits.

    head: for each key head of each sequence; split: for each 256 tokens of the longest sequence.
    """

    launch: float
    bytes: float
    head: float
    split: float


class PrefillAttentionCost(msgspec.Struct, frozen=True):
    """Of one layer's prefill attention; flops counts the visible half of the scores."""

    launch: float
    flops: float


class ExchangeCost(msgspec.Struct, frozen=True):
    """Alpha and beta of one exchange: launch, every peer more, bytes that leave a GPU."""

    launch: float
    peer: float
    bytes: float


class SamplingCost(msgspec.Struct, frozen=True):
    """Of drawing greedy tokens: launch, what several ranks add, fp32 logits of a rank read."""

    launch: float
    ranks: float
    bytes: float


class LayerCost(msgspec.Struct, frozen=True):
    """Of what else a layer does (rotation, stores, SiLU, gaps): each layer, and bytes moved.

    saved: seconds of a layer that its products take less in a step, where launches are dependent,
    than timed alone; `seconds` is then 0.
    """

    seconds: float
    bytes: float
    saved: float = 0.0


class AsideCost(msgspec.Struct, frozen=True):
    """Of an exchange under products: bytes a second that one of its programs sends."""

    program: float
    sharpness: float


class Source(msgspec.Struct, frozen=True):
    """A file that constants come from, and the commits of the runs in it that were used."""

    file: str
    commits: tuple[str, ...]


class FitError(msgspec.Struct, frozen=True):
    """How far a formula is from its figures: their number, relative error (rms and worst)."""

    figures: int
    rms: float
    worst: float


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything `step` multiplies. host: seconds of rank 0's host for each decoded row."""

    format: int
    gpu: str
    sources: tuple[Source, ...]
    products: dict[str, ProductCost]
    decode_attention: DecodeAttentionCost
    prefill_attention: PrefillAttentionCost
    one_shot: ExchangeCost
    two_shot: ExchangeCost
    library_gather: ExchangeCost
    sampling: SamplingCost
    layer: LayerCost
    aside: AsideCost
    host: float
    errors: dict[str, FitError]


@cache
def load_constants(gpu: str, folder: Path = FOLDER) -> Constants:
    """The constants of a GPU such as "h200". Raises UsageError naming those there are."""
    known = sorted(path.stem for path in folder.glob("*.json"))
    if gpu not in known:
        raise UsageError(
            f"--gpu {gpu}: not measured, use {', '.join(known)}, or measure it (tpdet bench, "
            "tpdet tune) and run python -m tpdet.planner.fit"
        )
    path = folder / f"{gpu}.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Constants)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} holds no constants ({error}): write it anew") from error
    if found.format != FORMAT:
        raise UsageError(f"{path} has format {found.format}, not {FORMAT}: write it anew")
    return found


def write_constants(constants: Constants, path: Path) -> None:
    """As indented JSON, numbers to six digits: more would be noise."""
    rounded = _rounded(msgspec.to_builtins(constants))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rounded), indent=1) + b"\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value
