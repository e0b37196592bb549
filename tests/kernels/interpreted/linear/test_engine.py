"""Hybrids through an engine, with the GPU's kernels of linear layers and gates, interpreted.

All else is the CPU's. Graphs are recorded: their steps are read from packed buffers, with pads.
"""

import pytest

from tests.lib.engine_harness import ask, run
from tests.lib.hybrid_answers import LONG, digest, drafted
from tests.lib.kernels.recorded_graphs import recorded_graphs
from tpdet.kernels import ops
from tpdet.kernels.cuda.linear import convolution, delta_rule, gated_norm
from tpdet.kernels.cuda.pointwise import gate
from tpdet.tools.synthetic.make_model import make_model

TOKENS, PROMPT = 12, LONG[:126]  # crosses the end of a chunk, in two steps of drafts of one shape
OPERATIONS = {
    convolution: ("short_convolution",),
    delta_rule: ("gated_delta", "advance_states"),
    gated_norm: ("gated_norm",),
    gate: ("gate_heads", "gate_lanes"),
}
HOW = {"dtype": "bfloat16", "max_num_seqs": 4, "max_model_len": 256, "kv_pages": 16}


@pytest.fixture(autouse=True)
def _kernels_of_gpus(monkeypatch):
    for module, names in OPERATIONS.items():
        for name in names:
            monkeypatch.setattr(ops, name, getattr(module, name))


def asked():
    return ask("a", PROMPT, max_tokens=TOKENS, logprobs=0)


def crowded(model):
    """The answer beside two that come before and behind it; what runs is preempted."""
    before, behind = (ask(f"o{i}", LONG[i : 41 * i], max_tokens=4) for i in (1, 2))
    requests = [before, asked(), behind]
    return run(model, requests, preempt_every=4, max_num_batched_tokens=100, **HOW)


def with_drafts(model, told):
    """The answer with runs of four drafts, of which the first three of the answer's are right."""
    how = {"max_num_batched_tokens": 200, **HOW}
    return drafted(model, told, 3, 4, PROMPT, TOKENS, **how)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_moe_text"])
def test_chunks_crowds_drafts_and_graphs_change_no_bit(tmp_path, family):
    sizes = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64}
    model = make_model(tmp_path / "m", like=family, vocab=1100, **sizes)
    expected = run(model, [asked()], max_num_batched_tokens=200, **HOW)
    for budget in (63, 65):
        found = run(model, [asked()], max_num_batched_tokens=budget, **HOW)
        assert digest(found) == digest(expected), budget
    assert digest(crowded(model)) == digest(expected)
    told = expected.tokens("a")
    assert with_drafts(model, told).answer("a") == expected.answer("a")
    with recorded_graphs() as replays:
        assert digest(crowded(model)) == digest(expected)
        assert with_drafts(model, told).answer("a") == expected.answer("a")
    kinds = {(bool(batch.blocks), batch.short_rows) for shape in replays for batch in shape.batches}
    assert kinds == {(True, 1), (False, 1), (False, 16)}
