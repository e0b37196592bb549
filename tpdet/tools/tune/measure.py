"""What all tuners share: kernels compiled side by side, quick times, the class of bits, full times.

Every candidate gets a few replays. The fastest few whose bits are right are then timed in turn.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from tpdet.kernels.cuda.compile.pool import compile_all
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.tools.measurement.graph_times import capture, interleaved_us

_QUICK = 3  # replays of a candidate that may be among the fastest
_SLOW = 1.3  # times the fastest so far: such a candidate is replayed once

Name = TypeVar("Name")
Item = TypeVar("Item")


def compile_all_of(launches: Iterable[Callable[[], object]]) -> tuple[int, int]:
    """Compile what these calls launch, side by side: how many kernels, and how many refusals.

    Nothing is launched. What its launch or the compiler refuses is left out by the measuring.
    """
    refused = 0
    with recording() as asked:
        for launch in launches:
            try:
                launch()
            except Exception:  # a tile that its launch refuses is no candidate
                refused += 1
    failed = compile_all(asked.values(), len(os.sched_getaffinity(0)))
    return len(asked), refused + len(failed)


def quick_us(
    runs: Mapping[Name, Callable[[Item], object]], items: Sequence[Item]
) -> dict[Name, float]:
    """Microseconds of a call of each run that this GPU takes, over all items; fastest first.

    One replay where it is far from the best so far, else a median.
    """
    times: dict[Name, float] = {}
    for name, run in runs.items():
        try:
            graph = capture(run, items)
        except Exception:  # a tile that this GPU or compiler refuses is no candidate
            torch.cuda.synchronize()
            continue
        [us] = interleaved_us([graph], len(items), 1)
        if us <= _SLOW * min(times.values(), default=math.inf):
            [us] = interleaved_us([graph], len(items), _QUICK)
        times[name] = us
    return dict(sorted(times.items(), key=lambda entry: entry[1]))


def first_in_class(
    names: Iterable[Name], most: int, problem: Callable[[Name], str | None]
) -> tuple[list[Name], dict[Name, str]]:
    """The first `most` names without a problem, and the problems of those that were passed over."""
    kept: list[Name] = []
    refused: dict[Name, str] = {}
    for name in names:
        if len(kept) == most:
            break
        if said := problem(name):
            refused[name] = said
        else:
            kept.append(name)
    return kept, refused


def full_us(
    runs: Iterable[Callable[[Item], object]], items: Sequence[Item], repeats: int
) -> list[float]:
    """Median microseconds of a call of each run, replayed in turn over all items."""
    return interleaved_us([capture(run, items) for run in runs], len(items), repeats)
