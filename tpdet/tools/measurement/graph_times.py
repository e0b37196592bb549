"""Times of calls inside CUDA graphs, replayed in turn so that clocks hit all alike."""

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import Generic, Protocol, TypeVar

import torch

COLD_BYTES = 150e6  # operands rotated over: three times an H200's L2 cache
_LEAST_CALLS = 4
_FLOPS = 0.7e15  # a second, about what a large product reaches

Item = TypeVar("Item")


class Replayable(Protocol):
    """A CUDA graph, or a stand-in for one."""

    def replay(self) -> None:
        """Launch every call of it."""


def rotated(weight: torch.Tensor) -> list[torch.Tensor]:
    """The weight and copies of it, together more than the L2 cache holds, as a list of calls."""
    copies = max(1, -(-int(COLD_BYTES) // (weight.numel() * weight.element_size())))
    weights = [weight, *(weight.clone() for _ in range(copies - 1))]
    return weights * -(-_LEAST_CALLS // copies)


def enough(weights: Sequence[torch.Tensor], rows: int) -> Sequence[torch.Tensor]:
    """As many of the calls as a product of `rows` rows needs: a long one hides no cold weight."""
    long_us = 2 * rows * weights[0].numel() / _FLOPS * 1e6
    return weights if long_us < 100 else weights[: 2 if long_us < 500 else 1]


def capture(run: Callable[[Item], object], items: Sequence[Item]) -> torch.cuda.CUDAGraph:
    """A graph that calls `run` on every item; called once before, outside the capture.

    One stream for all captures: a library keeps a workspace for each stream it has met.
    """
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(items[0])
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for item in items:
                run(item)
        finally:
            graph.capture_end()
    graph.replay()
    return graph


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


class Launched(Generic[Item]):
    """In place of a graph, for calls that cannot be captured: launched one by one."""

    def __init__(self, run: Callable[[Item], object], items: Sequence[Item]) -> None:
        self._run, self._items = run, items

    def replay(self) -> None:
        """Call `run` on every item."""
        for item in self._items:
            self._run(item)


def interleaved_us(graphs: Sequence[Replayable], calls: int, repeats: int) -> list[float]:
    """Median microseconds of a call, for graphs of `calls` calls each, replayed in turn."""
    events = [[_replay(graph) for graph in graphs] for _ in range(repeats)]
    torch.cuda.synchronize()
    times = [[begin.elapsed_time(end) for begin, end in turn] for turn in events]
    return [statistics.median(column) / calls * 1e3 for column in zip(*times, strict=True)]


def times_us(
    runs: Sequence[Callable[[Item], object]], items: Sequence[Item], repeats: int
) -> list[float]:
    """Median microseconds a call of each of `runs`, in graphs over all items, in turn."""
    return interleaved_us([capture(run, items) for run in runs], len(items), repeats)


def _replay(graph: Replayable) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    return begin, end
