"""`enable_return_routed_experts`: ids of every token and layer, whatever steps computed them."""

import numpy as np
import pytest
import torch

from tests.lib.engine_harness import ask, run
from tpdet import LLM, SamplingParams
from tpdet.errors import RequestError, UsageError
from tpdet.kernels import ops
from tpdet.requests.request import TokenOutput


def routed(model, prompts, **settings):
    """By request: int16 [tokens - 1, layers, k] of an answer of the toy, which has one layer."""
    found = run(model, prompts, enable_return_routed_experts=True, **settings)
    ends = {name: found.outputs[name][-1] for name in found.outputs}
    assert all(isinstance(end, TokenOutput) and end.finish_reason for end in ends.values())
    arrays = {
        name: np.frombuffer(end.routed_experts, np.int16).reshape(-1, 1, 4)
        for name, end in ends.items()
    }
    return {
        each.request_id: arrays[each.request_id][
            : len(each.prompt_token_ids) + len(found.tokens(each.request_id)) - 1
        ]
        for each in prompts
    }, found


def test_ids_are_those_of_the_choice_however_steps_are_cut(tiny_model, monkeypatch):
    model = tiny_model("qwen3_moe")
    prompts = [ask("a", range(5, 45), max_tokens=6), ask("b", range(7, 20), max_tokens=3)]
    seen, real = [], ops.choose_experts

    def watched(*arguments):
        found = real(*arguments)
        seen.append(found[0].clone())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ops, "choose_experts", watched)
        alone, plain = routed(model, prompts[:1])
    rows = torch.cat(seen)[-45:]  # of this request alone: 40 of the prompt, then one a step
    assert alone["a"].shape == (45, 1, 4) and (np.diff(alone["a"], axis=2) > 0).all()
    assert alone["a"][:, 0].tolist() == rows.tolist()
    for settings in (
        {"max_num_batched_tokens": 16},
        {"preempt_every": 3},
        {"tp": 2, "experts": "columns", "ahead": True},
    ):
        found, ran = routed(model, prompts, **settings)
        assert found["a"].tolist() == alone["a"].tolist() and found["b"].shape == (15, 1, 4)
        assert ran.hits == [0]
    said = plain.tokens("a")
    for drafts in (said, [*said[:3], said[3] + 1, *said[4:]]):  # right, and wrong from the fourth
        drafted = ask("a", range(5, 45), max_tokens=6, drafts=(tuple(drafts),))
        found, ran = routed(model, [drafted], look=False)
        assert found["a"].tolist() == alone["a"].tolist() and ran.steps < plain.steps


def test_results_of_llm_hold_them_and_what_cannot_be_is_refused(tiny_model):
    model = tiny_model("qwen3_moe")
    settings = {"skip_tokenizer_init": True, "device": "cpu", "kv_pages": 8, "max_model_len": 256}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, n=2, detokenize=False)
    with LLM(model, enable_return_routed_experts=True, **settings) as llm:
        for _ in range(2):  # the second is not read from a cache
            (answer,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
            assert answer.prompt_routed_experts.shape == (3, 1, 4)
            assert [each.routed_experts.shape for each in answer.outputs] == [(3, 1, 4)] * 2
            assert answer.prompt_routed_experts.dtype == np.int16
        with pytest.raises(RequestError, match="stop strings"):
            llm.engine.submit(ask("stopped", [5], stop=("x",)))
    with pytest.raises(UsageError, match="qwen3 has no experts to return"):
        LLM(tiny_model("qwen3"), enable_return_routed_experts=True, **settings)


def test_a_skewed_router_prefers_low_ids_wherever_its_experts_live(tiny_model):
    """Of 16 experts and 4 chosen: those of the first of two ranks get nearly all choices."""
    prompt = [ask("a", range(5, 69), max_tokens=2)]
    even, _ = routed(tiny_model("qwen3_moe"), prompt)
    skewed = tiny_model("qwen3_moe", router_skew=3.0)
    found, _ = routed(skewed, prompt)
    (counts, others) = (
        np.bincount(each["a"].ravel(), minlength=16) / each["a"].size for each in (found, even)
    )
    assert counts[:4].sum() > 0.6 and counts[:8].sum() > 0.85, counts
    assert others[:4].sum() < 0.45 and others[:8].sum() < 0.7, others
    for placed in ("lanes", "columns"):
        cut, _ = routed(skewed, prompt, tp=2, experts=placed)
        assert cut["a"].tolist() == found["a"].tolist()
