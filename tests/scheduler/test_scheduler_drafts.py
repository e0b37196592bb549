"""How many drafts a step gets: what its graph has room for, beside prompts and without."""

import pytest

from tests.lib.engine_harness import ask
from tpdet.requests.request import with_seed
from tpdet.scheduler.policy import Policy
from tpdet.scheduler.sequence import Sequence
from tpdet.speculative.fixed import FixedSpeculator


def counts_of(decoding, drafts, prompt=0):
    """Tokens of each row of a step: `decoding` sequences with `drafts` each, and a prompt."""
    speculator = FixedSpeculator(lambda sequence, most: [5] * drafts)
    policy = Policy(300, 4096, 600)
    for admission in range(decoding + bool(prompt)):
        length = 9 if admission < decoding else prompt
        request = ask(f"r{admission}", range(length), drafts=((1,),), max_tokens=200)
        sequence = Sequence.of(with_seed(request, 1), admission, 0)
        if admission < decoding:
            sequence.tokens.append(3)
        assert policy.page_manager.admit(sequence)
        sequence.computed = length if admission < decoding else 0
        policy.running.put(sequence)
        speculator.admit(request, [sequence])
    counts, budget = policy.choose()
    speculator.propose(policy.running, counts, budget)
    return list(counts.values())


def test_a_step_of_decode_rows_has_no_more_tokens_than_its_graph_has_rows():
    assert counts_of(20, 7) == [8] * 20
    counts = counts_of(64, 7)
    assert sum(counts) == 256 and counts[:24] == [8] * 24 and counts[-1] == 1
    assert counts_of(280, 7) == [1] * 280


@pytest.mark.parametrize(("drafts", "prompt"), [(3, 700), (100, 0)])
def test_few_rows_carry_drafts_beside_prompts_and_long_rows(drafts, prompt):
    counts = counts_of(64, drafts, prompt)
    assert sum(count > 1 for count in counts[:64]) == (24 if prompt else 2)
    assert counts[64:] == ([prompt] if prompt else [])
