"""Steps replayed from graphs, recorded on the CPU: the bits of steps launched one by one."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.lib.engine_harness import ask, run
from tests.lib.kernels.recorded_graphs import recorded_graphs
from tests.lib.some_slow import some_slow
from tpdet.checkpoint.model_config import load_model_config
from tpdet.comm.exchange import open as opened
from tpdet.comm.exchange.fold import GatherExchange, WholeStream
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.errors import ResourceError
from tpdet.models.decoder import Decoder
from tpdet.runner import Runner
from tpdet.runner.graphs import step_graphs
from tpdet.runner.graphs.engine_graphs import make_graphs
from tpdet.runner.graphs.packed_step import StepSpans
from tpdet.runner.graphs.step_graphs import StepGraphs, wanted_rows
from tpdet.runner.start import memory
from tpdet.runner.start.contracts import partition_of

LAST_LAYERS = (False, None), (True, None), (True, 64)
SETTINGS = {"max_num_seqs": 5, "max_model_len": 700, "kv_pages": 14}


class OwnedStream(GatherExchange):
    """A world's exchange whose ranks keep their own rows of the stream alone, as over peer memory.

    h of rows that a rank does not own is NaN; a step of few rows is everybody's.
    """

    few = 8

    def owners(self, rows):
        """The owner of each row of a micro-batch [M]; -1 where every rank has it."""
        share = -(-rows // self._world.size)
        return torch.arange(rows) // share if rows > self.few else torch.full((rows,), -1)

    def fold_and_norm(self, sums, finish, plan=None):
        """As that of a gather, but for the rows of others: of them each rank has y alone."""
        h, y = super().fold_and_norm(sums, finish, plan)
        owners = self.owners(len(h))
        theirs = (owners >= 0) & (owners != self._world.rank)
        return h.masked_fill(theirs[:, None], float("nan")), self._of_owners(y, owners)

    def stream_rows(self, hidden_MH, numbers_R, parts):
        """Those that their owners have."""
        owners = torch.cat([self.owners(rows) for rows in parts])[numbers_R]
        return self._of_owners(hidden_MH[numbers_R], owners)

    def _of_owners(self, mine, owners):
        everyone = self._world.all_gather(mine)
        return everyone[owners.clamp(min=0), torch.arange(len(mine))]


def requests():
    draws = {"temperature": 0.9, "seed": 4}
    return [
        ask("long", [5 + i % 90 for i in range(300)], max_tokens=4),
        ask("drawn", range(50, 53), max_tokens=6, **draws),
        ask("longer", [7 + i % 80 for i in range(420)], max_tokens=3, **draws),
        ask("choices", range(20, 40), n=2, max_tokens=5, **draws),
        ask("scored", range(30, 75), max_tokens=2, prompt_logprobs=1),
        ask("one", [9], max_tokens=3),
    ]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", kv_heads=2, hidden=64, intermediate=128, layers=1)


@pytest.fixture(scope="module")
def expected(model):
    return run(model, requests(), max_num_batched_tokens=400, **SETTINGS)


@pytest.fixture(scope="module")
def deep(tiny_model):
    return tiny_model("qwen3", heads=8, hidden=128, intermediate=128, layers=2)


@pytest.fixture(scope="module")
def deep_expected(deep):
    return run(deep, requests(), max_num_batched_tokens=400, **SETTINGS)


def same(found, expected):
    """Whether every logit and every answer has its bits."""
    answers = all(
        found.answer(request.request_id, choice) == expected.answer(request.request_id, choice)
        and found.prompt(request.request_id) == expected.prompt(request.request_id)
        for request in requests()
        for choice in range(request.params.n)
    )
    return answers and all(
        torch.equal(found.logits[key].view(torch.int32), logits.view(torch.int32))
        for key, logits in expected.logits.items()
    )


@pytest.mark.parametrize(
    ("tp", "cut_from", "settings"),
    [
        (1, None, {"max_num_batched_tokens": 400}),
        (1, 256, {"max_num_batched_tokens": 400, "ahead": True}),
        (1, None, {"max_num_batched_tokens": 37}),
        (2, 256, {"max_num_batched_tokens": 400, "preempt_every": 3}),
        (1, None, {"max_num_batched_tokens": 400, "fixed_batch": 3}),
    ],
)
def test_replayed_steps_have_the_bits_of_launched_ones(model, expected, tp, cut_from, settings):
    with recorded_graphs(cut_from) as replays:
        found = run(model, requests(), tp, **(SETTINGS | settings))
    assert same(found, expected)
    steps = [shape for shape in replays if shape.batches[0].blocks]
    assert len(steps) > 2 and len(steps) < len(replays), "of both kinds"
    assert (cut_from is None) == (max(len(shape.batches) for shape in steps) == 1)
    assert len(replays) >= tp * (found.steps - 1), "hardly a step was launched"


class FinishedRows:
    """Counts the rows that each step of rank 0 begins and finishes."""

    def __init__(self, monkeypatch):
        begin, finish, self.begun, self.finished = Decoder.begin, Decoder.finish, [], []

        def beginning(model, ids, *given, **more):
            if model.exchange.carrier.world.rank == 0:
                self.begun.append(len(ids))
            return begin(model, ids, *given, **more)

        def finishing(model, parts, *given):
            if model.exchange.carrier.world.rank == 0:
                self.finished.append(sum(len(rows.hidden_MH) for rows in parts))
            return finish(model, parts, *given)

        monkeypatch.setattr(Decoder, "begin", beginning)
        monkeypatch.setattr(Decoder, "finish", finishing)

    def check(self):
        """Only rows with logits, and the pads of a decode step, go through all of the layer."""
        steps = list(zip(self.begun, self.finished, strict=True))
        chunks = [few for rows, few in steps if rows > 60 and few < rows]
        assert 0 in chunks and max(chunks) <= 60
        scored = [few for rows, few in steps if few > SETTINGS["max_num_seqs"]]
        assert scored, "a scored prompt wants more rows than decode steps have"


@pytest.mark.parametrize(
    ("tp", "graphs", "cut_from"),
    some_slow(
        [(1, False, None), (1, True, None), (2, True, 64)],
        [(tp, graphs, cut) for tp in (1, 2, 4, 8) for graphs, cut in LAST_LAYERS],
    ),
)
def test_the_last_layer_is_finished_for_wanted_rows_alone(
    deep, deep_expected, monkeypatch, tp, graphs, cut_from
):
    """Each of several ranks has a part of the stream, in one micro-batch or in two."""
    if tp > 1:
        monkeypatch.setattr(opened, "GatherExchange", OwnedStream)
    with recorded_graphs(cut_from) if graphs else nullcontext():
        rows = FinishedRows(monkeypatch)
        found = run(deep, requests(), tp, max_num_batched_tokens=100, **SETTINGS)
    assert same(found, deep_expected)
    rows.check()


def test_rows_of_the_stream_come_from_their_owners(deep, deep_expected, monkeypatch):
    """Negative control: rows that this rank does not own, as it has them, reach a bit."""
    monkeypatch.setattr(opened, "GatherExchange", OwnedStream)
    monkeypatch.setattr(OwnedStream, "stream_rows", WholeStream.stream_rows)
    with recorded_graphs(64):
        try:
            found = run(deep, requests(), 2, max_num_batched_tokens=100, **SETTINGS)
        except AssertionError:
            return
    assert not same(found, deep_expected)


def test_a_step_without_a_bucket_is_launched(model, expected):
    with recorded_graphs() as replays, pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepSpans, "within", lambda self, shape: None if len(self.count) else [self])
        found = run(model, requests(), max_num_batched_tokens=400, **SETTINGS)
    assert same(found, expected)
    assert replays and not any(shape.batches[0].blocks for shape in replays)


def pads_on_page_zero(plain):
    def pack(self, shape, parts, scratch):
        plain(self, shape, parts, scratch)
        parts[1][int(self.count.sum()) :] = 3

    return pack


def one_off(rows, spans):
    wanted = wanted_rows(rows, spans)
    return replace(wanted, first=np.maximum(wanted.first - 1, 0))


@pytest.mark.parametrize("fault", ["a pad that writes", "a stale buffer", "rows one off"])
def test_what_is_wrong_is_noticed(model, expected, fault):
    """Negative controls: each of these must reach a bit, or be refused."""
    with recorded_graphs(), pytest.MonkeyPatch.context() as patch:
        if fault == "a pad that writes":
            patch.setattr(StepSpans, "pack", pads_on_page_zero(StepSpans.pack))
        if fault == "a stale buffer":
            fill, times = StepGraphs._fill, []

            def once(self, room, shape, rows, parts):
                times.extend(rows[:1])
                if len(times) != 3:
                    fill(self, room, shape, rows, parts)

            patch.setattr(StepGraphs, "_fill", once)
        if fault == "rows one off":
            patch.setattr(step_graphs, "wanted_rows", one_off)
        try:
            found = run(model, requests(), max_num_batched_tokens=400, **SETTINGS)
        except (AssertionError, IndexError):
            return
    assert not same(found, expected)


@pytest.mark.parametrize("approximate", [False, True])
def test_library_attention_is_not_captured_for_prompts(model, approximate):
    config = EngineConfig.from_values(
        model=str(model),
        device="cpu",
        approximate=approximate,
        max_num_batched_tokens=64,
        **SETTINGS,
    )
    runner = Runner.start(config, SoloWorld())
    assert runner.graphs is None, "there is no graph on the CPU"
    made = make_graphs(runner.model, runner.pages, runner.sampled, config, 64, 700, capture=False)
    assert (made.steps is None) == approximate
    runner.close()


def test_pages_leave_room_for_what_graphs_hold(model, monkeypatch):
    monkeypatch.setattr(memory, "free_gpu_bytes", lambda utilization: 10**9)
    config = EngineConfig.from_values(model=str(model))
    partition = partition_of(config, load_model_config(model, "auto"), SoloWorld())
    of = config, partition, 10**6, torch.device("cuda")
    whole, less = memory.pages_that_fit(*of), memory.pages_that_fit(*of, graphs=10**9 // 2)
    assert whole // 2 - 1 <= less <= whole // 2 + 1
    with pytest.raises(ResourceError, match="max-num-batched-tokens"):
        memory.pages_that_fit(*of, graphs=10**9)
