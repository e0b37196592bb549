"""One digest of answers over keys and values in fp8: sizes, batches, chunks, preemption, drafts."""

import pytest
import torch

from tests.lib.engine_harness import run
from tests.lib.hybrid_answers import CUTS, LONG, SHORT, asked, crowd, digest, drafted
from tests.lib.kernels.recorded_graphs import recorded_graphs
from tests.lib.some_slow import some_slow
from tpdet.kernels.cpu.pointwise import embedding

HOW = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}


@pytest.fixture(scope="module")
def dense(tiny_model):
    return tiny_model("qwen3", layers=2, kv_heads=2)


@pytest.fixture(scope="module")
def plain(dense):
    """The answer alone, its prompt in one step."""
    return run(dense, [asked()], **HOW, **SHORT)


def test_chunks_and_a_crowd_of_two_ranks_that_is_preempted_change_no_bit(dense, plain):
    found = crowd(dense, 2, tp=2, preempt_every=5, max_num_batched_tokens=130, **HOW)
    assert found.preemptions > 1
    assert digest(found) == digest(plain)


@pytest.mark.slow
def test_hits_drafts_and_graphs_change_no_bit(dense, plain):
    waves = [[asked(LONG[:256] + LONG[:20], "other")], [asked(name="b")]]
    found = run(dense, [asked()], waves=waves, **HOW, **SHORT)
    assert min(found.hits[1:]) >= 256
    assert digest(found, "b") == digest(plain, first=found.cached("b") - 1)
    for right in (200, 0, 2):
        found = drafted(dense, plain.tokens("a"), right, 5, **HOW, **SHORT)
        assert found.answer("a") == plain.answer("a")
    with recorded_graphs():
        found = crowd(dense, 3, max_num_batched_tokens=200, max_model_len=512, **HOW)
    assert digest(found) == digest(plain)


def test_pages_of_the_models_dtype_have_other_bits_and_another_contract(dense, plain):
    found = run(dense, [asked()], dtype="bfloat16", **SHORT)
    assert digest(found) != digest(plain)
    assert found.fingerprint.split("-")[1] != plain.fingerprint.split("-")[1]


@pytest.mark.parametrize("part", some_slow([1], [0, 1]))
def test_a_flipped_bit_of_a_code_or_an_exponent_is_found(dense, plain, monkeypatch, part):
    """The last bit of one number, or of one row's exponent, of the third token."""
    real = embedding.encode_pairs

    def flipped(k, v):
        keys, values = real(k, v)
        if len(k) > 3:
            keys[part][3].view(-1)[0] ^= 1
        return keys, values

    monkeypatch.setattr(embedding, "encode_pairs", flipped)
    assert digest(run(dense, [asked()], **HOW, **SHORT)) != digest(plain)


@pytest.mark.parametrize("lost", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_fails_its_request_alone(dense, plain, monkeypatch, lost):
    """One value of the prompt's 200th token, in a crowd."""
    real = embedding.encode_pairs

    def spoilt(k, v):
        if len(k) == 300:
            v = v.clone()
            v[199, 0, 3] = lost
        return real(k, v)

    monkeypatch.setattr(embedding, "encode_pairs", spoilt)
    requests = [asked(LONG[:300], "spoilt"), asked(LONG[1:90])]
    how = {"max_num_batched_tokens": 300, "max_num_seqs": 1, "look": False} | HOW
    found = run(dense, requests, **how)
    assert found.failure("spoilt") is not None and found.failure("a") is None
    monkeypatch.undo()
    assert found.answer("a") == run(dense, [asked(LONG[1:90])], **how).answer("a")


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text", "gpt_oss"])
def test_one_digest_over_every_size_and_circumstance(tiny_model, family, tp):
    """Dense, a hybrid, and a mixture with windows and sinks."""
    model = tiny_model(family, layers=4, kv_heads=2)
    expected = run(model, [asked()], **HOW, **SHORT)
    for budget in CUTS:
        found = run(model, [asked()], tp=tp, max_num_batched_tokens=budget, **HOW)
        assert digest(found) == digest(expected), budget
    for every in (0, 4):
        found = crowd(model, 7, tp=tp, preempt_every=every, max_num_batched_tokens=200, **HOW)
        assert digest(found) == digest(expected), every
    for right, length in ((200, 4), (0, 4), (2, 5)):
        found = drafted(model, expected.tokens("a"), right, length, tp=tp, **HOW, **SHORT)
        assert found.answer("a") == expected.answer("a"), right
