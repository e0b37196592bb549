"""Warming up runs every size of step, on every rank alike, and leaves no trace in an answer."""

import pytest

from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run
from tpdet.models.warm_up import pages_needed, sizes
from tpdet.runner.start.warming import warm_engine

pytestmark = pytest.mark.long


def test_sizes_are_of_both_kinds_and_end_at_the_limit():
    assert list(sizes(1)) == [1]
    assert list(sizes(20)) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 20]
    assert list(sizes(16)) == [1, 2, 3, 4, 5, 8, 9, 16]


def test_pages_hold_the_longest_prefill_of_one_sequence():
    assert pages_needed(2048, 40960) == 8
    assert pages_needed(2049, 40960) == 9
    assert pages_needed(2048, 300) == 2
    assert pages_needed(16, 40960) == 2  # decoded rows read two


@pytest.mark.parametrize(
    ("context", "tp"),
    [
        (200, 1),
        (600, 2),
        pytest.param(200, 2, marks=pytest.mark.slow),
        pytest.param(600, 1, marks=pytest.mark.slow),
    ],
)
def test_a_warm_engine_answers_with_the_bits_of_a_cold_one(tiny_model, tp, context):
    model = tiny_model("qwen3", kv_heads=2)
    requests = [ask("a", range(40), prompt_logprobs=0)]
    settings = {"max_num_batched_tokens": 270, "max_num_seqs": 5, "max_model_len": context}
    cold = run(model, requests, **settings)

    def change(engine):
        warm_engine(engine.runner.loaded, lambda: None)

    warm = run(model, requests, tp=tp, change=change, **settings)
    for key, logits in cold.logits.items():
        assert_same_bits(warm.logits[key], logits, str(key))
