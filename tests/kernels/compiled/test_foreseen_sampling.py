"""No way of sampling that a request may ask for compiles a kernel while serving."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.lib.kernels.driverless import compile_for_hopper, take_gpu_kernels
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.cuda.sampling import launch
from tpdet.kernels.inputs.plain_rows import WORDS, PlainRows, pack_row
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.models.warm_up import sample_every_kind_alone, sample_in_one_step, sizes
from tpdet.requests.request import SamplingParams
from tpdet.runner.graphs.decode_graphs import row_buckets
from tpdet.runner.step.shared_rows import RowSharing
from tpdet.sampling.sampler import (
    prompt_logprobs,
    sample_columns,
    sample_likeliest,
    sample_shared,
)

VOCABULARY = 151_936  # passes over a row change form at 14, 28 and 56 rows
MOST = 64
KINDS = {
    "greedy": [{"temperature": 0.0}],
    "greedy, told": [{"temperature": 0.0, "logprobs": 5}],
    "greedy, biased": [{"temperature": 0.0, "logit_bias": {3: 2.0}}],
    "greedy, penalised": [{"temperature": 0.0, "repetition_penalty": 1.2}],
    "plain": [{"temperature": 1.0}],
    "min-p": [{"temperature": 0.7, "min_p": 0.1}],
    "top-k": [{"temperature": 1.0, "top_k": 50}],
    "top-p": [{"temperature": 1.0, "top_p": 0.9}],
    "both, told": [{"temperature": 1.0, "top_k": 50, "top_p": 0.9, "logprobs": 20}],
    "one filtered": [{"temperature": 0.0}] * 20 + [{"temperature": 1.0, "top_k": 5}],
    "plain and penalised": [{"temperature": 1.0}, {"temperature": 0.5, "presence_penalty": 0.5}],
}  # fmt: skip


def asked(work):
    """Digest -> name of the kernels that `work` would launch."""
    with recording() as found:
        work()
    return {digest: each.name for digest, each in found.items()}


def rows_of(params, count):
    """The params and counts of rows that are asked for so, in turn."""
    asked = [SamplingParams(**params[i % len(params)]) for i in range(count)]
    rows = [
        RowParams(
            temperature=it.temperature,
            seed=1,
            position=3,
            top_k=it.top_k,
            top_p=it.top_p,
            min_p=it.min_p,
            bias=it.logit_bias,
            repetition_penalty=it.repetition_penalty,
            presence_penalty=it.presence_penalty,
            prompt_ids=(1, 2) if it.repetition_penalty != 1.0 else (),
            output_ids=(3,) if it.penalises else (),
        )
        for it in asked
    ]
    return rows, [it.logprobs for it in asked]


def written(logits, top_p):
    """Sample one row beside pads by numbers that were written."""
    numbers = np.zeros(len(logits) * WORDS, np.int64)
    plain = PlainRows(pack_row(3, 0, 1.0, -1, top_p, 0.0), [7])
    filtered = launch.write_rows(plain, VOCABULARY, numbers)
    assert filtered == (top_p < 1.0)
    table = torch.from_numpy(numbers)
    launch.sample_written(logits, table, filtered, Shard(0, VOCABULARY))
    launch.move_on(table, torch.ones(len(logits), dtype=torch.int64))


@pytest.mark.parametrize("processed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_kind_at_every_number_of_rows_is_foreseen(monkeypatch, tmp_path, processed):
    compile_for_hopper(monkeypatch, tmp_path)
    take_gpu_kernels(monkeypatch)
    logits = torch.zeros(MOST, VOCABULARY)
    parts = [logits[:rows] for rows in sizes(MOST)]
    mixed = asked(lambda: [sample_in_one_step(x, processed=processed) for x in parts])
    alone = asked(lambda: [sample_every_kind_alone(x, processed) for x in parts])
    assert ("write_processed" in {*mixed.values()}) == processed
    foreseen = mixed | alone
    late = {}
    for rows in (1, 13, 14, 28, 55, 56, 64):
        part = logits[:rows]
        works = {
            name: lambda part=part, params=params, rows=rows: sample_columns(
                part, *rows_of(params, rows), Shard(0, VOCABULARY), processed
            )
            for name, params in KINDS.items()
        }
        works["likeliest"] = lambda part=part: sample_likeliest(part, Shard(0, VOCABULARY))
        works["given"] = lambda part=part, rows=rows: prompt_logprobs(part, [5] * rows, 3)
        if rows in row_buckets(MOST):
            for top_p in (1.0, 0.9):
                works[f"written, top-p {top_p}"] = partial(written, part, top_p)
        for name, work in works.items():
            if new := {kernel for at, kernel in asked(work).items() if at not in foreseen}:
                late[f"{name}, {rows} rows"] = new
    assert not late
    # The check sees what is missing: a step of several kinds asks for less than each alone.
    assert "sum_rows" in {kernel for at, kernel in alone.items() if at not in mixed}


class Exchange:
    """Of rank 0 of two: what comes from the other is zeros."""

    def whole_rows(self, logits):
        return torch.zeros(-(-len(logits) // 2), 2 * logits.shape[1])

    def all_gather(self, x):
        return torch.stack([x, torch.zeros_like(x)])


@pytest.mark.parametrize("processed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_kind_that_ranks_draw_together_is_foreseen(monkeypatch, tmp_path, processed):
    compile_for_hopper(monkeypatch, tmp_path)
    take_gpu_kernels(monkeypatch)
    exchange, world = Exchange(), SimpleNamespace(rank=0, size=2)
    shard = Shard(0, VOCABULARY, exchange.all_gather)
    sharing = RowSharing.__new__(RowSharing)
    sharing._rows, sharing._world, sharing._shard = exchange, world, shard
    sharing._columns, sharing._most, sharing._processed = VOCABULARY // 2, 128, processed
    foreseen = asked(lambda: sharing.warm_up(torch.device("cpu")))
    logits = torch.zeros(128, VOCABULARY // 2)
    kinds = {
        "greedy": [{"temperature": 0.0}], "plain": [{"temperature": 1.0}],
        "top-k": [{"temperature": 1.0, "top_k": 50}], "top-p": [{"temperature": 1.0, "top_p": 0.9}],
        "one filtered": [{"temperature": 0.0}] * 9 + [{"temperature": 1.0, "top_k": 5}],
        "one filtered in the other share": [{"temperature": 0.0}] * 127
        + [{"temperature": 1.0, "top_k": 5}],
    }  # fmt: skip
    late = {}
    for rows in (2, 14, 30, 56, 112, 128):
        part, counts = logits[:rows], [0] * rows
        for name, params in kinds.items():
            given = [RowParams(seed=1, position=2, **params[i % len(params)]) for i in range(rows)]
            works = [lambda *of: sample_shared(*of, exchange, 0, 2, VOCABULARY, processed)]
            if name in ("greedy", "plain"):
                works.append(lambda *of: sample_columns(*of, shard, processed))
            for way, work in zip(("shares", "columns"), works, strict=False):
                found = asked(lambda work=work, of=(part, given, counts): work(*of))
                if new := {kernel for at, kernel in found.items() if at not in foreseen}:
                    late[f"{name}, {rows} rows by {way}"] = new
    assert not late
