"""The sampler: rows beside each other, log-probabilities, rows that fail."""

import math

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tests.scheduler.simulated.answers import make_prompt
from tpdet.control.row_messages import SampledToken
from tpdet.kernels.cpu import threads
from tpdet.kernels.cpu.sampling import ranks
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.sampling import sampler
from tpdet.sampling.sampler import NumericalFailure, prompt_logprobs
from tpdet.scheduler.rows import row_params
from tpdet.scheduler.sequence import Sequence

PARAMETERS = (
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "logprobs": 20},
    {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.2, "logprobs": 0},
    {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": -0.5, "logprobs": 1},
    {"temperature": 0.9, "top_p": 0.5, "logit_bias": {3: 5.0, 7: -100.0}},
)


def row(index: int, forbidden: tuple[int, ...] = (), **asked) -> tuple[RowParams, int | None]:
    """A row's params, with ids where a penalty reads them, and how many likeliest ids it shows."""
    tokens = [(index * 31 + i * i) % 997 for i in range(12 + index)]
    logprobs, bias = asked.pop("logprobs", None), asked.pop("logit_bias", {})
    params = RowParams(
        asked.pop("temperature", 1.0),
        seed=index * 7919,
        position=len(tokens),
        choice=index % 4,
        bias=bias,
        prompt_ids=tokens[:9] if "repetition_penalty" in asked else (),
        output_ids=tokens[9:] if any("penalty" in name for name in asked) else (),
        forbidden=forbidden,
        **asked,
    )
    return params, logprobs


def sample(logits: torch.Tensor, rows: list) -> list:
    return sampler.sample(logits, [how for how, _ in rows], [count for _, count in rows])


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    x[:, ::2] = (x[:, ::2] * 2).round() / 2  # ties
    return x


def same(left: list, right: list) -> bool:
    """Equal to the bit: floats of fp32 values compare exactly, and none is NaN."""
    return left == right and repr(left) == repr(right)


@pytest.mark.parametrize(("rows", "vocabulary"), [(64, 1_000), (64, 4_099), (7, 151_936)])
def test_a_row_in_a_crowd_has_the_bits_it_has_alone(rows, vocabulary):
    logits = logits_of(rows, vocabulary)
    inputs = [row(i, (11, 12) if i % 3 else (), **PARAMETERS[i % 6]) for i in range(rows)]
    together = sample(logits, inputs)
    alone = [sample(logits[i : i + 1].clone(), inputs[i : i + 1])[0] for i in range(rows)]
    assert same(together, alone)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [inputs[i] for i in order])
    assert same([together[i] for i in order], shuffled)


def test_the_thread_count_changes_no_answer():
    logits = logits_of(12, 32_003)
    inputs = [row(i, **PARAMETERS[i % 6]) for i in range(12)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = sample(logits, inputs)
        torch.set_num_threads(2)
        assert same(one, sample(logits, inputs))
    finally:
        torch.set_num_threads(before)


def test_worker_threads_change_no_answer():
    logits = logits_of(12, 32_003)
    inputs = [row(i, **PARAMETERS[i % 6]) for i in range(12)]
    before = torch.get_num_threads()
    one = sample(logits, inputs)
    try:
        threads.configure(2)
        assert same(one, sample(logits, inputs))
    finally:
        threads.configure(1)
        torch.set_num_threads(before)


def test_the_chosen_token_stands_among_the_likeliest_with_the_same_number():
    logits = logits_of(40, 1_000)
    for index, answer in enumerate(sample(logits, [row(i, **PARAMETERS[2]) for i in range(40)])):
        assert len(answer.top) == 20
        known = {candidate.token_id: candidate.logprob for candidate in answer.top}
        assert known.get(answer.token_id, answer.logprob) == answer.logprob
        pairs = [(-candidate.logprob, candidate.token_id) for candidate in answer.top]
        values = logits[index, [candidate.token_id for candidate in answer.top]].tolist()
        assert values == sorted(values, reverse=True)
        assert pairs[0][0] == min(pairs)[0]


def test_greedy_takes_the_first_of_the_likeliest():
    logits = torch.zeros(3, 50)
    logits[1, 30:] = 2.0
    logits[2, 49] = -0.0
    answers = sample(logits, [row(i, temperature=0.0, logprobs=3) for i in range(3)])
    assert [answer.token_id for answer in answers] == [0, 30, 0]
    assert [[c.token_id for c in answer.top] for answer in answers] == [
        [0, 1, 2],
        [30, 31, 32],
        [0, 1, 2],
    ]
    assert all(answer.top[0].logprob == answer.logprob for answer in answers)


def test_log_probabilities_precede_bias_penalties_temperature_and_filters():
    logits = logits_of(1, 1_000)
    plain = sample(logits, [row(1, temperature=0.0, logprobs=20)])[0]
    for parameters in ({"temperature": 0.0, "logit_bias": {plain.token_id: -1.0}}, PARAMETERS[3]):
        other = sample(logits, [row(1, **{**parameters, "logprobs": 20})])[0]
        assert other.top == plain.top
        scored = prompt_logprobs(logits, [other.token_id], 20)[0]
        assert same([scored], [other])


def test_prompt_scores_have_the_same_bits_whole_or_in_pieces():
    logits = logits_of(20, 1_000)
    ids = [i * 37 % 1_000 for i in range(20)]
    whole = prompt_logprobs(logits, ids, 4)
    assert same(
        whole, prompt_logprobs(logits[:3], ids[:3], 4) + prompt_logprobs(logits[3:], ids[3:], 4)
    )
    exact = torch.log_softmax(logits.to(torch.float64), -1)
    for index, scored in enumerate(whole):
        assert scored.token_id == ids[index]
        assert abs(scored.logprob - float(exact[index, ids[index]])) < 3e-6
    assert prompt_logprobs(logits[:0], [], 4) == []


def test_a_rank_counts_the_ids_before_it_in_the_order_of_the_likeliest():
    logits = logits_of(40, 1_000)
    logits[:, 900:] = -torch.inf
    logits[3, :5] = torch.tensor([-0.0, 0.0, -0.0, 0.0, -0.0])
    order = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True).indices.tolist()
    ids = [index * 37 % 1_000 for index in range(40)]
    for index, scored in enumerate(prompt_logprobs(logits, ids, 20)):
        assert order[index][scored.rank - 1] == ids[index]
        assert [c.token_id for c in scored.top] == order[index][:20]
    for parameters in PARAMETERS:
        for index, answer in enumerate(sample(logits, [row(i, **parameters) for i in range(40)])):
            asked = "logprobs" in parameters
            assert not asked or order[index][answer.rank - 1] == answer.token_id
            assert asked or answer.rank == 0
    hot = [row(i, temperature=2.0, logprobs=1) for i in range(40)]
    assert max(answer.rank for answer in sample(logits, hot)) > 20, "none was outside the likeliest"


def test_ranks_are_the_same_over_any_blocks(monkeypatch):
    logits = logits_of(20, 1_000)
    ids = [index * 37 % 1_000 for index in range(20)]
    whole = prompt_logprobs(logits, ids, 0)
    monkeypatch.setattr(ranks, "_BLOCK_ELEMENTS", 3_500)
    assert prompt_logprobs(logits, ids, 0) == whole


def test_minus_infinity_is_a_logprob_and_no_failure():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    scored = prompt_logprobs(logits, [1], 3)[0]
    assert scored.logprob == -math.inf
    assert [candidate.token_id for candidate in scored.top] == [0, 2, 1]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_row_fails_alone(poison):
    logits = logits_of(9, 1_000)
    inputs = [row(i, **PARAMETERS[i % 6]) for i in range(9)]
    clean = sample(logits, inputs)
    for place in (0, 517, 999):
        poisoned = logits.clone()
        poisoned[4, place] = poison
        poisoned[6] = -torch.inf
        answers = sample(poisoned, inputs)
        for index, answer in enumerate(answers):
            if index in (4, 6):
                assert isinstance(answer, NumericalFailure)
            else:
                assert same([answer], [clean[index]])


def test_a_row_with_nothing_left_to_choose_fails_alone():
    logits = logits_of(2, 10)
    everything = tuple(range(10))
    answers = sample(logits, [row(0, everything, temperature=1.0), row(1, temperature=1.0)])
    assert isinstance(answers[0], NumericalFailure)
    assert isinstance(answers[1], SampledToken)


def test_penalties_split_at_the_original_prompt_length():
    """An id of the prompt is not counted by frequency and presence, but is by repetition."""
    logits = torch.tensor([[5.0, 4.0, 3.0]])

    def token(prompt_length: int, **penalties) -> int:
        ids = [0, 0, 1]
        request = make_prompt("r", ids, temperature=0.0, max_tokens=4, **penalties)
        sequence = Sequence.of(request, 0, 0)
        sequence.prompt_length = prompt_length
        how = row_params(sequence, 3)
        return sample(logits, [(how, None)])[0].token_id

    assert token(3, frequency_penalty=2.0) == 0
    assert token(2, frequency_penalty=2.0) == 0
    assert token(1, frequency_penalty=0.4, presence_penalty=0.2) == 0
    assert token(0, frequency_penalty=2.0) == 2
    assert token(0, presence_penalty=2.0) == 0
    assert token(3, repetition_penalty=2.0) == 2


def test_logits_are_not_changed_and_their_layout_does_not_matter():
    wide = logits_of(6, 2_000)
    strided = wide[:, ::2]
    inputs = [row(i, **PARAMETERS[i]) for i in range(6)]
    before = strided.clone()
    assert same(sample(strided, inputs), sample(strided.contiguous(), inputs))
    assert_same_bits(strided, before)


def test_logits_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"torch.bfloat16"):
        sample(torch.zeros(1, 10, dtype=torch.bfloat16), [row(0)])
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(1, 10), [row(0), row(1)])
    assert sample(torch.zeros(0, 10), []) == []


def test_named_ids_have_the_bits_of_scored_tokens_beside_rows_of_other_kinds():
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1))
    ids = (2999, 0, 17)
    rows = [row(1)[0], row(2)[0], row(3, temperature=0.0)[0], row(4)[0]]
    beside = [ids, 3, None, ids[:1]]
    found = sample(logits, list(zip(rows, beside, strict=True)))
    plain = sample(logits, list(zip(rows, [0, 3, None, 0], strict=True)))
    assert [f.token_id for f in found] == [f.token_id for f in plain]
    assert found[1].top == plain[1].top and found[2].top == ()
    for index in (0, 3):
        top = found[index].top
        assert tuple(c.token_id for c in top) == beside[index]
        scored = [prompt_logprobs(logits[index : index + 1], [i], 0)[0] for i in beside[index]]
        assert [c.logprob for c in top] == [s.logprob for s in scored]
    prompt = prompt_logprobs(logits[:2], [5, 6], ids)
    assert [c.logprob for c in prompt[0].top] == [c.logprob for c in found[0].top]
    assert prompt[1].top != prompt[0].top  # control: another row
