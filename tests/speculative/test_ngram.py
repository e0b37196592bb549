"""n-gram drafts: what stood behind the last tokens before, in the prompt or in the output."""

import random
from itertools import pairwise

import pytest

from tpdet.speculative.proposers.ngram import GRAM, Ngram, PromptIndex

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def ask(ngram, tokens, most=5):
    return ngram.propose(most) if ngram.match(tokens, len(tokens)) else []


def longest_match(tokens):
    """The greatest length at which the end of `tokens` stands earlier in them; 0 under GRAM."""
    lengths = range(GRAM, len(tokens))
    ends = {n: tokens[-n:] for n in lengths}
    return max(
        (n for n in lengths if any(tokens[i : i + n] == ends[n] for i in range(len(tokens) - n))),
        default=0,
    )


def test_what_stood_behind_the_last_tokens_is_proposed():
    ngram = Ngram(PromptIndex(PROMPT))
    assert ask(ngram, [*PROMPT, 50, 9, 2, 6]) == []
    assert ask(ngram, [*PROMPT, 50, 9, 2, 6, 5]) == [3, 5, 8, 9, 7]
    assert ask(ngram, [*PROMPT, 50, 9, 2, 6, 5, 3, 5], most=2) == [8, 9]
    assert ask(ngram, [*PROMPT, 50, 9, 2, 6, 5, 3, 5, 60]) == []


def test_a_place_near_the_end_repeats_what_lies_between():
    ngram = Ngram(PromptIndex(PROMPT))
    assert ask(ngram, [*PROMPT, *[41, 42] * 4], most=5) == [41, 42, 41, 42, 41]


def test_the_longest_match_is_followed():
    prompt = [*range(20, 40), 90, 25, 26, 27, 28, 29, 70]
    ngram = Ngram(PromptIndex(prompt))
    tokens = [*prompt, 80, 24, 25, 26, 27, 28]
    assert ngram.match(tokens, len(tokens)) == 5, "four at the later place"
    assert ngram.propose(3) == [29, 30, 31]
    assert ngram.match([*tokens, 29, 30], len(tokens) + 2) == 7


@pytest.mark.parametrize("seed", range(3))
def test_every_match_of_a_random_text_is_found_however_seldom_it_is_asked(seed):
    draw = random.Random(seed)
    text = [draw.randrange(3) for _ in range(150)]
    places = sorted({30, *draw.sample(range(30, 150), 60)})
    ngram = Ngram(PromptIndex(text[:30]))
    proposed = 0
    for place, after in pairwise(places):
        match = ngram.match(text[:place], place)
        assert match <= longest_match(text[:place])
        assert bool(match) == (longest_match(text[:place]) > 0)
        if match:
            proposed += 1
            drafts = ngram.propose(3)
            begins = [
                i
                for i in range(place - match)
                if text[i : i + match] == text[place - match : place]
            ]
            assert any((text[i + match : place] * 3)[:3] == drafts for i in begins)
        assert after > place
    assert proposed > 20


def test_only_the_end_of_a_long_prompt_is_indexed():
    prompt = [*range(100, 110), *range(1000, 41_000), 70, 71, 72, 73, 74]
    for beginning, told in (([100, 101, 102, 103], []), ([70, 71, 72, 73], [74])):
        assert ask(Ngram(PromptIndex(prompt)), [*prompt, 5, *beginning], most=1) == told
