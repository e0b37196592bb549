"""Where a schema begins: every place, however tokens come and go."""

import random

import pytest

from tpdet.grammar.schema_start import SchemaStart

PROMPT = [7, 8, 9, 7]  # ids of the prompt do not count


def first_place(ids, output):
    """The same by its definition, from all tokens; None where the schema does not hold yet."""
    if not ids:
        return 0
    *row, last = ids
    if row and output[:1] != row[:1]:
        return 0
    for start in range(len(output) - len(row)):
        if output[start : start + len(row)] == row:
            rest = output[start + len(row) :]
            return start + len(row) + rest.index(last) + 1 if last in rest else None
    return None


@pytest.mark.parametrize(
    ("ids", "output", "expected"),
    [
        ((), [1, 2], [0, 0, 0]),
        ((7,), [1, 7, 2, 7], [None, None, 2, 2, 2]),
        ((7,), [7, 7], [None, 1, 1]),
        ((5, 7), [5, 1, 7, 2, 7], [0, None, None, 3, 3, 3]),
        ((5, 7), [1, 5, 7], [0, 0, 0, 0]),
        ((5, 6, 7), [5, 1, 7, 2, 5, 6, 7, 3], [0, None, None, None, None, None, None, 7, 7]),
        ((5, 6, 7), [5, 6, 4, 4, 7], [0, None, None, None, None, 5]),
        ((5, 5, 5), [5, 5, 5], [0, None, None, 3]),
    ],
)
def test_the_schema_begins_at_these_positions(ids, output, expected):
    tokens, first = PROMPT + output, len(PROMPT)
    start = SchemaStart(ids, first)
    shifted = [None if place is None else first + place for place in expected]
    assert [start.begin(tokens, first + i) for i in range(len(shifted))] == shifted
    again = SchemaStart(ids, first)  # asked at the end first
    assert [again.begin(tokens, first + i) for i in reversed(range(len(shifted)))] == shifted[::-1]
    assert start.opening(first) == (ids[0] if len(ids) > 1 else None)
    assert start.opening(first + 1) is None


def test_tokens_that_were_taken_back_leave_no_trace():
    draw = random.Random(1)
    for ids in ((2,), (1, 2), (1, 2, 3), (1, 1, 2, 3)):
        begun = 0
        for _ in range(40):
            start, tokens, first = SchemaStart(ids, len(PROMPT)), list(PROMPT), len(PROMPT)
            for _ in range(40):
                if draw.random() < 0.3:
                    keep = draw.randrange(first, len(tokens) + 1)
                    del tokens[keep:]
                    start.take_back(keep)
                tokens += draw.choices(range(1, 4), k=draw.randrange(4))
                position = draw.randrange(first, len(tokens) + 1)
                output = tokens[first:position]
                wanted = first_place(ids, output) if output or len(ids) == 1 else 0
                found = start.begin(tokens, position)
                assert found == (None if wanted is None else first + wanted)
                begun += found not in (None, first)
        assert begun > 5
