"""`log_prob` has the bits of the engine's log-probabilities, of the weights as they are."""

import pytest
import torch

import tpdet.nn
from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.engine_harness import ask, run
from tests.nn import rank_pairs
from tests.nn.controls import CONTROLS, stale_page
from tests.nn.sampled_tokens import SampledTokens, bits_of
from tpdet.errors import RequestError, UsageError

SHAPE = {"hidden": 128, "layers": 2, "intermediate": 256}
SIZES = {"qwen3": (1, 4), "qwen3_moe": (2,)}
IDS = torch.arange(90) * 37 % 1100


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", **SHAPE)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def compared(request, tiny_model):
    """A model with 8 key heads, its log-probabilities at two sizes, and the tokens they are of."""
    model = tiny_model(request.param, **rank_pairs.SHAPE)
    return model, *rank_pairs.compare(model, 48, SIZES[request.param], of_wave=8)


def scores(model, *lengths):
    with torch.no_grad():
        return model.log_prob(IDS[: sum(lengths)], lengths)


def test_an_engine_and_log_prob_have_one_answer_at_any_pair_of_sizes(compared):
    _, pairs, _ = compared
    assert {pair["tokens"] for pair in pairs} == {48}
    assert not any(pair["mismatches"] for pair in pairs)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_is_seen(compared, control):
    model, _, sampled = compared
    assert CONTROLS[control](model, sampled) > 0


def test_a_reload_leaves_no_stale_page(model):
    assert stale_page(model, reload=True) == 0


def test_tokens_that_met_too_little_are_refused():
    with pytest.raises(ValueError, match="met no drafts, chunks: sample more"):
        SampledTokens(met={"drafts": 0, "preemptions": 3, "chunks": 0}).check_met()


def test_a_temperature_gives_the_processed_log_probabilities(model):
    prompt = IDS[:9].tolist()
    request = ask("warm", prompt, temperature=0.7, seed=3, logprobs=0, max_tokens=20)
    result = run(model, [request], look=False, logprobs_mode="processed_logprobs")
    tokens = result.outputs["warm"]
    ids = [*prompt, *(token.token_id for token in tokens)]
    loaded = tpdet.nn.load(model, device="cpu")
    for temperature, same in ((0.7, True), (1.0, False)):
        with torch.no_grad():
            ours = loaded.log_prob(ids, [len(ids)], temperature)[len(prompt) - 1 :]
        bits = [bits_of(token.logprob) for token in tokens]
        assert (ours.view(torch.int32).tolist() == bits) is same


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_an_optimizer_step_gives_the_bits_of_a_model_loaded_anew(tiny_model, family, tmp_path):
    model = tiny_model(family, tie=family == "llama", **SHAPE)
    loaded = tpdet.nn.load(model, device="cpu")
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.5)
    before = scores(loaded, 30, 60)
    weights = {name: values.clone() for name, values in loaded.state_dict().items()}
    loaded.log_prob(IDS, [30, 60]).square().sum().backward()
    optimizer.step()
    same = [n for n, values in loaded.state_dict().items() if torch.equal(values, weights[n])]
    after = scores(loaded, 30, 60)
    tpdet.nn.save(loaded, tmp_path / "saved")
    anew = tpdet.nn.load(tmp_path / "saved", device="cpu")
    assert not same and not same_bits(before, after)
    assert_same_bits(after, scores(anew, 30, 60))
    loaded.get_parameter("model.norm.weight").data.mul_(2.0)  # no version counter moves
    assert not same_bits(after, scores(loaded, 30, 60))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma2", "starcoder2", "gpt_oss"])
def test_rows_have_the_same_bits_with_gradients_and_in_any_company(tiny_model, family):
    loaded = tpdet.nn.load(tiny_model(family, **SHAPE), device="cpu")
    together = scores(loaded, 40, 1, 7, 42)
    learned = loaded.log_prob(IDS, [40, 1, 7, 42])
    assert learned.requires_grad and not together.requires_grad
    assert_same_bits(learned, together)
    with torch.no_grad():
        alone = loaded.log_prob(IDS[48:], [42])
    assert_same_bits(together[-41:], alone)


def test_wide_parameters_compute_in_the_model_s_dtype(model):
    loaded = tpdet.nn.load(model, device="cpu")
    before = scores(loaded, 90)
    loaded.float()
    assert_same_bits(scores(loaded, 90), before)
    loaded.log_prob(IDS, [90]).sum().backward()
    assert {p.grad.dtype for p in loaded.parameters()} == {torch.float32}


def test_weights_that_are_not_finite_give_nan(model):
    loaded = tpdet.nn.load(model, device="cpu")
    with torch.no_grad():
        loaded.get_parameter("model.norm.weight")[3] = torch.nan
    assert scores(loaded, 9).isnan().all()


def test_a_family_has_a_class_and_others_are_refused(model):
    kind = tpdet.nn.Qwen3
    assert isinstance(tpdet.nn.from_pretrained(kind, model, device="cpu"), kind)
    with pytest.raises(UsageError, match="family qwen3, not llama"):
        tpdet.nn.from_pretrained(tpdet.nn.Llama, model, device="cpu")
    with pytest.raises(UsageError, match="did you mean 'fold_order'"):
        tpdet.nn.load(model, fold_ordre="tree")


@pytest.mark.parametrize(
    ("ids", "lengths", "temperature", "message"),
    [
        ([1, 2, 3], [2], 1.0, "add up to the 3 ids"),
        ([1, 2], [2, 0], 1.0, "must be positive"),
        ([1, 1100], [2], 1.0, "1100 is none of the vocabulary's 1100"),
        ([1, -2], [2], 1.0, "-2 is none"),
        ([0.5, 1.0], [2], 1.0, "use integers"),
        ([1, 2], [2], 0.0, "must be over 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(model, ids, lengths, temperature, message):
    loaded = tpdet.nn.load(model, device="cpu")
    with pytest.raises(RequestError, match=message):
        loaded.log_prob(ids, lengths, temperature)


def test_sequences_of_one_token_have_no_scores(model):
    loaded = tpdet.nn.load(model, device="cpu")
    assert loaded.log_prob([5, 6], [1, 1]).shape == (0,)
