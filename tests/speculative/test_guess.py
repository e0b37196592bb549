"""Where an output is in a guess of it: followed, lost and found again."""

from tpdet.speculative.proposers.prediction import FEW_DRAFTS, Guess

IDS = [(i * i + 7 * i) % 97 for i in range(60)]


def ask(guess, output, most=100):
    known = guess.look([5, *output], 1 + len(output))
    return guess.next(most) if known else None


def test_an_equal_output_is_followed_to_the_end():
    guess = Guess(IDS, 1)
    assert ask(guess, []) == IDS
    assert ask(guess, IDS[:7], most=3) == IDS[7:10]
    assert ask(guess, [*IDS, 1]) is None and guess.is_spent


def test_a_place_is_found_again_by_the_last_ids_with_few_drafts_first():
    guess = Guess(IDS, 1)
    output = [*IDS[:10], 98, 98]
    assert ask(guess, output) is None and not guess.is_spent
    output += IDS[20:24]
    assert ask(guess, output) == IDS[24 : 24 + FEW_DRAFTS]
    output += IDS[24:29]
    assert ask(guess, output) == IDS[29 : 29 + 2 * FEW_DRAFTS]


def test_a_place_that_was_wrong_needs_a_longer_match():
    ids = [1, 2, 3, 4, 50, 60, 70, 80] * 3
    guess = Guess([9, *ids], 1)
    output = [8, 1, 2, 3, 4]
    assert ask(guess, output) is not None
    output += [99, 1, 2, 3, 4]
    assert ask(guess, output) is None
    output += [50, 60, 70, 80]
    assert ask(guess, output) is not None


def test_an_output_that_the_guess_does_not_hold_stays_lost():
    guess, output = Guess(IDS, 1), []
    for i in range(200):
        output.append(100 + i)
        assert ask(guess, output) is None
