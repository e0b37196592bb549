"""`tpdet bench sampler`: sampling tokens, with log-probabilities, beside torch's way.

CUDA graphs over rotating logits time both in turn; the host's data of each step is there before.
Torch's way is what engines run: sort, masks and an exponential race for random rows, argmax for
greedy ones, log_softmax for the log-probability. At TP above 1 a rank's share of the vocabulary is
timed, with copies of it in place of the other ranks' results; torch's way always takes whole rows.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tpdet.kernels import ops
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.tools.bench.kernels.gpu import gpu_only, random_values, this_gpu
from tpdet.tools.measurement.floor import CaseWork, print_floor
from tpdet.tools.measurement.graph_times import Launched, Replayable, capture, interleaved_us
from tpdet.tools.measurement.rows import BenchRow, finish, kernel_row
from tpdet.tools.worlds.lists import parse_sizes

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}
_COPIES = 2


def sampler_command(options: argparse.Namespace) -> int:
    """Every way of sampling at every batch and size."""
    gpu_only("sampler")
    rows = []
    for mode in WAYS:
        for ranks in parse_sizes(options.tp):
            for count in parse_sizes(options.batch):
                rows.append(_case(mode, ranks, count, options.vocabulary, options.repeats))
                torch.cuda.empty_cache()
    return finish("sampler", this_gpu(), rows, options.output, as_json=options.json)


def _case(mode: str, ranks: int, count: int, vocabulary: int, repeats: int) -> BenchRow:
    share = -(-vocabulary // (16 * ranks)) * 16 if ranks > 1 else vocabulary
    passes = 2 if mode == "greedy" else 3  # over the logits, at least
    work = CaseWork(0.0, passes * 4.0 * count * min(share, vocabulary))
    floor = print_floor(f"{mode}, TP {ranks}, {count} rows", work)
    way = WAYS[mode]
    params = [RowParams(seed=i, position=40 + i, **way) for i in range(count)]
    shard = Shard(0, vocabulary, None if ranks == 1 else _copies(ranks))
    parts = [random_values(count, share, seed=s, dtype=torch.float32) * 3 for s in range(_COPIES)]
    whole = [
        random_values(count, vocabulary, seed=s, dtype=torch.float32) * 3 for s in range(_COPIES)
    ]
    with _tables_kept():
        ours = capture(lambda x: ops.sample_rows(x, params, shard), parts)
        name, graph = _torchs_way(whole, way)
        ours_us, peer_us = interleaved_us([ours, graph], _COPIES, repeats)
    case: dict[str, Any] = {"mode": mode, "tp": ranks, "batch": count, "dtype": "float32"}
    return kernel_row("sampler", ours_us, floor, (name, peer_us), **case)


def _torchs_way(logits: list[torch.Tensor], way: dict[str, Any]) -> tuple[str, Replayable]:
    """Its name and its graph; its calls, where one of them waits for the GPU."""

    def run(x: torch.Tensor) -> object:
        return torch_sample(x, **way)

    try:
        return "torch", capture(run, logits)
    except RuntimeError:
        torch.cuda.synchronize()
        return "torch, launched", Launched(run, logits)


def torch_sample(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [R, V] -> ids [R, 1] and their log-probabilities, by torch's own operations."""
    logprobs = logits.log_softmax(-1)
    if temperature == 0.0:
        ids = logits.argmax(-1, keepdim=True)
        return ids, logprobs.gather(-1, ids)
    values = logits / temperature
    if top_k or top_p < 1.0:
        ordered, places = values.sort(dim=-1, descending=True)
        if top_k:
            ordered[:, top_k:] = -torch.inf
        mass = ordered.softmax(-1)
        ordered = ordered.masked_fill(mass.cumsum(-1) - mass > top_p, -torch.inf)
        values = torch.empty_like(values).scatter_(-1, places, ordered)
    probabilities = values.softmax(-1)
    race = torch.empty_like(probabilities).exponential_()
    ids = probabilities.div_(race).argmax(-1, keepdim=True)
    return ids, logprobs.gather(-1, ids)


def _copies(ranks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A gather that shows a rank its own tensor `ranks` times."""
    return lambda x: x.expand(ranks, *x.shape).contiguous()


@contextmanager
def _tables_kept() -> Iterator[None]:
    """Send each table of numbers to the GPU once: a graph's copies from the host would be lost."""
    from tpdet.kernels.cuda.sampling import launch

    send, kept = launch.to_device, {}

    def once(
        values: Sequence[float] | Sequence[int] | np.ndarray,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        key = tuple(values), dtype
        if key not in kept:
            kept[key] = send(values, dtype, device)
        return kept[key]

    launch.to_device = once
    try:
        yield
    finally:
        launch.to_device = send
