"""A draft model's later steps, replayed as a chain: the drafts of planned steps."""

import numpy as np
import pytest
import torch

from tests.engine.test_draft_model import drafting
from tests.engine.test_drafts import SAMPLED
from tests.lib.engine_harness import ask, run
from tests.lib.kernels.recorded_graphs import recorded_graphs
from tpdet.cache.versions import VersionTable
from tpdet.errors import IntegrityError
from tpdet.kernels import ops
from tpdet.kernels.inputs.plain_rows import WORDS, PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.runner.graphs import decode_chain
from tpdet.runner.graphs.decode_graphs import DecodeGraphs, decode_shapes
from tpdet.speculative.draft_model.model import DraftModel
from tpdet.speculative.draft_model.times import DraftTimes

TINY = {"kv_heads": 2, "hidden": 64, "intermediate": 128, "layers": 1, "vocab": 1280}
PROMPT = [(11 * i + i * i) % 1100 for i in range(250)]
REQUESTS = [
    ask("greedy", PROMPT[:33], max_tokens=30),
    ask("turns", PROMPT, max_tokens=40, **SAMPLED),  # comes to its second page
    ask("filtered", PROMPT[5:30], max_tokens=9, top_p=0.9, top_k=50, min_p=0.01, **SAMPLED),
    ask("choices", PROMPT[3:60], max_tokens=21, n=2, **SAMPLED),
]


def drafts_of(model, other, monkeypatch, requests=REQUESTS):
    """What the draft model says in each call, its counts, and how many links and steps it took."""
    said, counts, draft = [], {}, DraftModel.draft
    took = {"links": 0, "steps": 0, "samples": 0}
    chain, step = decode_chain.DecodeChain, decode_chain.ChainedSteps.step

    def saying(self, wanted):
        found = draft(self, wanted)
        said.append(
            [(it.key, len(it.tokens), ids) for (it, _), ids in zip(wanted, found, strict=True)]
        )
        return found

    def counting(name, method):
        def counted(self, *of):
            found = method(self, *of)
            took[name] += found is not None
            return found

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(DraftModel, "draft", saying)
        patch.setattr(DraftTimes, "seconds", lambda self, sequences: 1e-6)  # it often pays
        patch.setattr(chain, "begin", counting("links", chain.begin))
        patch.setattr(chain, "sample", counting("samples", chain.sample))
        patch.setattr(decode_chain.ChainedSteps, "step", counting("steps", step))
        drafting(model, other, requests, counts)
    return said, counts["draft_model"], took


@pytest.mark.parametrize("right", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_chain_drafts_what_planned_steps_do(tiny_model, monkeypatch, right):
    model = tiny_model("qwen3", **TINY)
    other = model if right else tiny_model("qwen3", **TINY, seed=5)
    monkeypatch.setattr(decode_chain, "MOST_STEPS", 4)
    planned, counts, took = drafts_of(model, other, monkeypatch)
    assert took["links"] == 0
    with recorded_graphs() as replays:
        chained, found, took = drafts_of(model, other, monkeypatch)
    assert chained == planned and found == counts
    assert took["steps"] > 2 * took["links"] > 4 and took["samples"] > 0
    assert 2 * took["steps"] <= len(replays)
    if right:
        assert found.accepted_tokens == found.draft_tokens > 60


LONG = pytest.mark.slow


@pytest.mark.parametrize(
    "forgotten",
    ["noise", "nothing", *(pytest.param(it, marks=LONG) for it in ("slots", "positions", "ids"))],
)
def test_what_a_chain_leaves_behind_is_seen(tiny_model, monkeypatch, forgotten):
    model, packed = tiny_model("qwen3", **TINY), []
    pack, step = DecodeGraphs.pack, decode_chain.ChainedSteps.step

    def noting(self, rows):
        packed[:] = [pack(self, rows), self.room]
        return packed[0]

    def forgetful(self):
        packed_step, room = packed
        ids, (parts,) = packed_step.shape.views(room.packed, torch.int64)
        parts = {"positions": parts.positions, "slots": parts.slots, "ids": ids}
        before = {name: part.clone() for name, part in parts.items() if name == forgotten}
        found = step(self)
        for name, part in before.items():
            parts[name].copy_(part)
        return found

    monkeypatch.setattr(DecodeGraphs, "pack", noting)
    monkeypatch.setattr(decode_chain.ChainedSteps, "step", forgetful)
    if forgotten == "noise":
        monkeypatch.setattr(ops, "move_on", lambda numbers, by: None)
    asked = [ask(f"r{i}", PROMPT[i : 9 + 8 * i], max_tokens=4 + 9 * i, **SAMPLED) for i in range(3)]
    with recorded_graphs():
        _, found, took = drafts_of(model, model, monkeypatch, asked)
    assert took["steps"] > 3
    wrong = found.switched_off or found.accepted_tokens < found.draft_tokens
    assert wrong == (forgotten != "nothing")


def test_a_link_whose_rows_may_not_read_their_pages_is_refused(tiny_model, monkeypatch):
    model, check = tiny_model("qwen3", **TINY), VersionTable.check_readers

    def refusing(self, rows):
        if rows.decodes and rows.ids[0] < 0:
            raise IntegrityError("planted")
        check(self, rows)

    monkeypatch.setattr(VersionTable, "check_readers", refusing)
    plain = run(model, REQUESTS[:1], look=False)
    counts = {}
    with recorded_graphs():
        found = drafting(model, model, REQUESTS[:1], counts)
    assert found.tokens("greedy") == plain.tokens("greedy")
    assert counts["draft_model"].switched_off == 1


def test_shapes_of_as_many_rows_share_what_a_chain_moves_on():
    places = {}
    for shape in decode_shapes(70, 36):
        packed = torch.arange(shape.words, dtype=torch.int32)
        ids, (parts,) = shape.views(packed, torch.int64)
        moved = [ids, parts.positions, parts.slots, parts.spans[: shape.rows]]
        found = [(part.storage_offset(), part.shape, part.flatten()[0].item()) for part in moved]
        assert places.setdefault(shape.rows, found) == found
    assert len(places) > 5


def test_written_rows_are_sampled_as_rows_are():
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)) * 3
    how = [
        RowParams(0.0, 5, 40),
        RowParams(1.0, 2**64 - 3, 41, choice=2),
        RowParams(0.7, 2**40, 2**20, top_k=7, top_p=0.3, min_p=0.05),
        RowParams(1.3, 1, 43, min_p=0.2),
    ]
    shard = Shard(0, 500)
    numbers = np.zeros(6 * WORDS, np.int64)
    assert ops.write_rows(logits, PlainRows.of(how), 500, numbers)
    written = torch.from_numpy(numbers)
    for step in range(3):
        moved = [way._replace(position=way.position + step) for way in how]
        found = ops.sample_written(logits, written, True, shard)
        assert torch.equal(found.packed[:4], ops.sample_rows(logits[:4], moved, shard).packed)
        ops.move_on(written, torch.tensor([1, 1, 1, 1, 0, 0]))
    assert not ops.write_rows(logits, PlainRows.of([how[0], how[1], how[3]]), 500, numbers)
