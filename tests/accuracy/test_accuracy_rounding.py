"""What the contract's third version gains: the distance of log-probabilities from the exact ones.

A relation inside one run, on one checkpoint: the product's error, that of the second version's
roundings evaluated in torch, and that of transformers in the same dtype.
"""

import pytest
import torch
import transformers

from tests.accuracy.torch_forward import EXACT, NUMERICS_2, NUMERICS_3, log_probabilities
from tests.lib.engine_harness import ask, run

TOKENS = 400
SHARE = 0.7  # of the error of the second version, at most


@pytest.fixture(scope="module")
def model(tiny_model):
    """Deep enough that what is rounded once a layer adds up; weights in bf16, so all see one."""
    return tiny_model("qwen3", layers=16, dtype="bfloat16")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 1024, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def exact(model, ids):
    return log_probabilities(model, ids, EXACT)


def product(model, ids, **settings):
    """The engine's own log-probabilities of ids[1:], fp64 [T - 1]."""
    request = ask("a", ids, max_tokens=1, prompt_logprobs=0)
    found = run(model, [request], dtype="bfloat16", **settings).prompt("a")
    return torch.tensor(found.logprobs[1:], dtype=torch.float64)


def mean_error(found, exact):
    return (found - exact).abs().mean().item()


def test_the_fold_is_closer_than_the_second_version_and_than_transformers(model, ids, exact):
    ours = mean_error(product(model, ids), exact)
    second = mean_error(log_probabilities(model, ids, NUMERICS_2), exact)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = network(torch.tensor([ids])).logits[0, :-1].double()
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert ours <= SHARE * second, (ours, second)
    assert ours < mean_error(theirs, exact), (ours, mean_error(theirs, exact))


def test_gathered_rows_round_their_products_and_are_still_closer(model, ids, exact):
    gathered = mean_error(product(model, ids, row_layers="gather"), exact)
    assert gathered < mean_error(log_probabilities(model, ids, NUMERICS_2), exact)


def test_the_forward_in_torch_is_the_contract_s(model, ids, exact):
    """Its third form has the product's error, its second form has not."""
    ours = mean_error(product(model, ids), exact)
    third = mean_error(log_probabilities(model, ids, NUMERICS_3), exact)
    second = mean_error(log_probabilities(model, ids, NUMERICS_2), exact)
    assert abs(ours - third) <= 0.1 * third < 0.5 * abs(ours - second), (ours, third, second)
