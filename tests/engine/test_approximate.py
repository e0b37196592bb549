"""Approximate arithmetic: named everywhere, never entered unasked, and never mixed with strict."""

import dataclasses
import itertools

import pytest
import torch

from tests.lib.engine_harness import ask, run, small_config
from tests.lib.some_slow import some_slow
from tests.lib.tree import ROOT
from tpdet.cli import main
from tpdet.comm.world.world import SoloWorld
from tpdet.engine import Engine
from tpdet.errors import IntegrityError, UsageError
from tpdet.kernels.cpu.attention.attention import paged_attention
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.stock import attention as stock_attention
from tpdet.llm import LLM
from tpdet.requests.request import SamplingParams

PROMPTS = [ask("a", range(5, 300)), ask("b", [3, 4, 5], temperature=0.9, seed=4)]


@pytest.mark.parametrize(
    ("tp", "dtype"),
    some_slow(
        [(1, "float32"), (2, "bfloat16")], itertools.product((1, 2), ("float32", "bfloat16"))
    ),
)
def test_it_answers_and_its_bits_are_not_the_strict_ones(tiny_model, tp, dtype):
    model = tiny_model("qwen2", kv_heads=2)
    strict = run(model, PROMPTS, tp=tp, dtype=dtype)
    found, again = (run(model, PROMPTS, tp=tp, dtype=dtype, approximate=True) for _ in range(2))
    for name in ("a", "b"):
        assert all(o.approximate for o in found.outputs[name])
        assert not any(o.approximate for o in strict.outputs[name])
        assert found.answer(name) == again.answer(name)
    key = ("a", 0, 299 - 5)
    assert not torch.equal(found.logits[key], strict.logits[key])
    # Close all the same: it is the same model.
    scale = strict.logits[key].abs().max()
    assert (found.logits[key] - strict.logits[key]).abs().max() < 0.05 * scale
    assert found.fingerprint.startswith("tpdet-approximate-")
    assert found.fingerprint.split("-")[3] == strict.fingerprint.split("-")[2]
    assert "approximate" not in strict.fingerprint


def test_its_contract_names_the_ranks_and_the_strict_one_does_not(tiny_model):
    model = tiny_model("qwen3", kv_heads=2)
    (strict, other), (mine, mine_2) = (
        [run(model, PROMPTS[1:], tp=tp, approximate=way).fingerprint for tp in (1, 2)]
        for way in (False, True)
    )
    assert strict == other and mine != mine_2


def test_windows_and_chunks_are_attended_as_the_contract_means_them(tiny_model):
    draw = torch.Generator().manual_seed(1)
    k, v = (torch.randn(6, 2, 256, 32, generator=draw) for _ in range(2))
    sequences = (
        PagedSequence(0, 1, 300, (2, 5)), PagedSequence(1, 40, 250, (1, 4)),
        PagedSequence(41, 20, 0, (3,)),
    )  # fmt: skip
    q = torch.randn(61, 4, 32, generator=draw)
    batch = make_batch(sequences)
    plan = stock_attention.gather_plan(batch, q.device)
    assert plan.key_ends.tolist() == [0, 301, 591, 611] and plan.most_rows == 40
    for window in (None, 17):
        wanted = paged_attention(q, k, v, batch, window)
        found = stock_attention.paged_attention(q, k, v, batch, window, plan)
        assert (found - wanted).abs().max() < 1e-5
        moved = dataclasses.replace(plan, places=plan.places.flip(0))
        wrong = stock_attention.paged_attention(q, k, v, batch, window, moved)
        assert (wrong - wanted).abs().max() > 0.1


def test_the_offline_api_gives_no_replay_digest_for_it(tiny_model):
    params = SamplingParams(temperature=0.0, max_tokens=3)
    for approximate in (False, True):
        llm = LLM(str(tiny_model()), skip_tokenizer_init=True, kv_pages=8, approximate=approximate)
        (found,) = llm.generate([[1, 2, 3]], params)
        llm.close()
        assert (found.replay_digest is None) == approximate
        assert found.system_fingerprint.startswith("tpdet-approximate-") == approximate
    with pytest.raises(UsageError, match="a server's setting"):
        LLM(str(tiny_model()), on_slowdown="approximate")


def test_what_excludes_it_is_refused(tiny_model, capsys):
    with pytest.raises(UsageError, match="exclude each other"):
        small_config("m", approximate=True, on_slowdown="approximate")
    with pytest.raises(UsageError, match="need row_layers fold"):
        small_config("m", approximate=True, row_layers="gather")
    with pytest.raises(UsageError, match="max_slowdown"):
        small_config("m", on_slowdown="approximate", max_slowdown=1.0)
    assert main(["verify", "--approximate"]) == 2
    assert "not deterministic, there is nothing to verify" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [{}, {"approximate": True}])
def test_no_plan_changes_what_the_operator_did_not_permit(tiny_model, asked):
    """A plan for approximate arithmetic stops a strict rank, and the other way round."""
    engine = Engine(small_config(tiny_model(), **asked), SoloWorld())
    engine.arithmetic.approximate = not asked
    engine.submit(ask("a", [1, 2, 3]))
    with pytest.raises(IntegrityError, match="may not change to"):
        engine.step()


def test_no_layer_asks_which_arithmetic_it_has():
    root = ROOT / "tpdet"
    for folder in ("layers", "models", "cache"):
        for path in (root / folder).glob("*.py"):
            assert ".approximate" not in path.read_text(), path
