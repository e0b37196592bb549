"""Tune one product: at each bucket, the fastest tile and library call that keep the bits.

Every candidate gets a few replays; the fastest few, the library and the peer then run in turn. Bits
are compared with the reference variant at the bucket, and for tiles at the fewest rows of it too.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.functional import linear

from tpdet.kernels import ops
from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.admission import REFERENCE, by_library, by_tile
from tpdet.kernels.cuda.gemm.choice.candidates import column_candidates
from tpdet.kernels.cuda.gemm.choice.library import library_ways
from tpdet.kernels.cuda.gemm.choice.shape_table import BUCKETS, Choice
from tpdet.kernels.cuda.gemm.choice.static import column_tile
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.inputs.product import Product
from tpdet.tools.bench.kernels.timing import Replayable, capture, enough, interleaved_us, rotated

_QUICK = 3  # replays of a candidate that may be among the fastest
_SLOW = 1.3  # times the fastest so far: such a candidate is replayed once
_FINALISTS = 4  # tiles that are measured in full
_GAIN = 0.985  # a library must beat the tile by so much: the tile serves every row count

Name = Tile | str
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """What a bucket got: its choice and microseconds of it, of the best tile and of the peer."""

    choice: Choice
    us: float
    tile_us: float
    peer_us: float


@dataclass
class Tuned:
    """Rows by bucket, and what was refused for other bits: by name, at which rows and data.

    times: microseconds of every candidate that ran, by bucket and name.
    """

    product: Product
    rows: dict[int, Row] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)
    times: dict[int, dict[str, float]] = field(default_factory=dict)


class ProductTuner:
    """Operands of one product and the reference's results on each kind of data."""

    def __init__(
        self, product: Product, most_rows: int, repeats: int, device: torch.device
    ) -> None:
        """Draw operands for up to `most_rows` rows."""
        self.product, self._repeats = product, repeats
        n, k = product.n, product.k
        self._rows = {
            kind: trial_data.trial_rows(kind, most_rows, k, device) for kind in trial_data.KINDS
        }
        self._weights = {
            kind: trial_data.trial_weight(kind, n, k, device) for kind in trial_data.KINDS
        }
        self._wanted = {
            kind: by_tile(
                product.kind, x, self._weights[kind][: trial_data.BASE_ROWS], REFERENCE.at(k)
            )
            for kind, x in self._rows.items()
        }
        self._cold = rotated(self._weights["random"])
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._descriptors = torch.cuda.get_device_capability(device) >= (9, 0)

    def tune(self, buckets: Iterable[int]) -> Tuned:
        """Every bucket in turn."""
        tuned = Tuned(self.product)
        for bucket in buckets:
            times = tuned.times.setdefault(bucket, {})
            tuned.rows[bucket] = self._tune_bucket(bucket, tuned.refused, times)
        return tuned

    def ranking(self, bucket: int) -> list[str]:
        """The fastest tiles, then the library's ways: microseconds, time over linear's, bits."""
        calls = self._calls(bucket)
        tiles = self._quick(bucket, {name: c for name, c in calls.items() if not _library(name)})
        names = [*list(tiles)[: 2 * _FINALISTS], *(name for name in calls if _library(name))]
        peer, *times = self._full(bucket, [calls[name] for name in names])
        lines = []
        for name, us in zip(names, times, strict=True):
            kept = self._in_class(bucket, calls, [name], 1, {})
            lines.append(
                f"{us:7.2f} us {us / peer:5.2f} {title(name)}{'' if kept else ' OTHER BITS'}"
            )
        return lines

    def _tune_bucket(
        self, bucket: int, refused: dict[str, list[str]], found: dict[str, float]
    ) -> Row:
        calls = self._calls(bucket)
        quick = self._quick(bucket, {name: c for name, c in calls.items() if not _library(name)})
        found |= {title(name): us for name, us in quick.items()}
        tiles = self._in_class(bucket, calls, list(quick), _FINALISTS, refused)
        ways = [name for name in calls if _library(name)]
        ways = self._in_class(bucket, calls, ways, len(ways), refused)
        if not tiles:
            raise RuntimeError(f"{self.product} at {bucket} rows: no tile keeps the bits")
        peer, *times = self._full(bucket, [calls[name] for name in (*tiles, *ways)])
        us = dict(zip((*tiles, *ways), times, strict=True))
        found |= {title(name): value for name, value in us.items()}
        tile = min(tiles, key=lambda name: us[name])
        way = min(ways, key=lambda name: us[name], default=None)
        if way is not None and us[way] >= _GAIN * us[tile]:
            way = None
        assert isinstance(tile, Tile)
        choice = Choice(bucket, tile, way if isinstance(way, str) else None)
        return Row(choice, us[tile if way is None else way], us[tile], peer)

    def _calls(self, bucket: int) -> dict[Name, Call]:
        product, kind = self.product, self.product.kind
        wide = kind == "head"
        sms = self._sms if self._descriptors else 0
        static = column_tile(bucket, product.n, product.k, float32=False, wide_out=wide, sms=sms)
        tiles = column_candidates(
            bucket, product.n, product.k, kind=kind, descriptors=self._descriptors
        )
        calls: dict[Name, Call] = {}
        for tile in dict.fromkeys((static, *tiles)):
            calls[tile] = partial(by_tile, kind, tile=tile)
        for way in library_ways(product, bucket):
            calls[way] = partial(by_library, kind, way=way)
        return calls

    def _quick(self, bucket: int, calls: dict[Name, Call]) -> dict[Name, float]:
        """Microseconds of the tiles that run, fastest first."""
        found: dict[Name, float] = {}
        x, cold = self._rows["random"][:bucket], enough(self._cold, bucket)
        for name, call in calls.items():
            try:
                graph = capture(partial(call, x), cold)
            except Exception:  # a tile that this GPU or compiler refuses is no candidate
                torch.cuda.synchronize()
                continue
            found[name] = quick_us(graph, len(cold), min(found.values(), default=math.inf))
        return dict(sorted(found.items(), key=lambda entry: (entry[1], str(entry[0]))))

    def _full(self, bucket: int, calls: list[Call]) -> list[float]:
        """Microseconds of the peer in the model's dtype, then of each call, in turn."""
        x, cold = self._rows["random"][:bucket], enough(self._cold, bucket)
        runs = [linear_and_activation if self.product.gated else linear, *calls]
        graphs = [capture(partial(run, x), cold) for run in runs]
        return interleaved_us(graphs, len(cold), self._repeats)

    def _in_class(
        self,
        bucket: int,
        calls: dict[Name, Call],
        names: list[Name],
        most: int,
        refused: dict[str, list[str]],
    ) -> list[Name]:
        """The first `most` of the names that give the reference's bytes."""
        found: list[Name] = []
        for name in names:
            if len(found) == most:
                break
            counts = [bucket] if _library(name) else [bucket, fewest_rows(bucket)]
            wrong = [kind for kind in trial_data.KINDS if self._differs(calls[name], kind, counts)]
            if wrong:
                kinds = "" if len(wrong) == len(trial_data.KINDS) else f" ({', '.join(wrong)})"
                refused.setdefault(title(name), []).append(f"{bucket}{kinds}")
            else:
                found.append(name)
        return found

    def _differs(self, call: Call, kind: str, counts: list[int]) -> bool:
        weight = self._weights[kind]
        try:
            flags = [
                trial_data.differs(call(self._rows[kind][:m], weight), self._wanted[kind][:m])
                for m in counts
            ]
            return bool(torch.stack(flags).any())
        except RuntimeError:  # a library way that does not exist for this shape
            torch.cuda.synchronize()
            return True


def quick_us(graph: Replayable, calls: int, best: float) -> float:
    """Microseconds of a call: one replay where it is far from the best so far, else a median."""
    first = interleaved_us([graph], calls, 1)[0]
    return first if first > _SLOW * best else interleaved_us([graph], calls, _QUICK)[0]


def title(name: Name) -> str:
    """A tile or a library's way in words."""
    return name if isinstance(name, str) else format_tile(name)


def linear_and_activation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What stock engines run in place of a gated product."""
    return ops.activate_and_multiply(linear(x, weight))


def _library(name: Name) -> bool:
    return isinstance(name, str)


def fewest_rows(bucket: int) -> int:
    """One row more than the next smaller bucket has."""
    smaller = [rows for rows in BUCKETS if rows < bucket]
    return smaller[-1] + 1 if smaller else bucket
