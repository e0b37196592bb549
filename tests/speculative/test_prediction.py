"""Where an output is in a prediction of it: followed, lost and found again."""

from tpdet.speculative.proposers.prediction import FEW_DRAFTS, PredictedOutput

IDS = [(i * i + 7 * i) % 97 for i in range(60)]


def ask(predicted, output, most=100):
    known = predicted.match([5, *output], 1 + len(output))
    return predicted.propose(most) if known else None


def test_an_equal_output_is_followed_to_the_end():
    predicted = PredictedOutput(IDS, 1)
    assert ask(predicted, []) == IDS
    assert ask(predicted, IDS[:7], most=3) == IDS[7:10]
    assert ask(predicted, [*IDS, 1]) is None and predicted.is_spent


def test_a_place_is_found_again_by_the_last_ids_with_few_drafts_first():
    predicted = PredictedOutput(IDS, 1)
    output = [*IDS[:10], 98, 98]
    assert ask(predicted, output) is None and not predicted.is_spent
    output += IDS[20:24]
    assert ask(predicted, output) == IDS[24 : 24 + FEW_DRAFTS]
    output += IDS[24:29]
    assert ask(predicted, output) == IDS[29 : 29 + 2 * FEW_DRAFTS]


def test_a_place_that_was_wrong_needs_a_longer_match():
    ids = [1, 2, 3, 4, 50, 60, 70, 80] * 3
    predicted = PredictedOutput([9, *ids], 1)
    output = [8, 1, 2, 3, 4]
    assert ask(predicted, output) is not None
    output += [99, 1, 2, 3, 4]
    assert ask(predicted, output) is None
    output += [50, 60, 70, 80]
    assert ask(predicted, output) is not None


def test_an_output_that_the_prediction_does_not_hold_stays_lost():
    predicted, output = PredictedOutput(IDS, 1), []
    for i in range(200):
        output.append(100 + i)
        assert ask(predicted, output) is None
