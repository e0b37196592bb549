"""The covering sets that expensive tests take instead of whole products."""

from itertools import combinations, product

import pytest

from tests.lib.pairwise import pairwise

SHAPES = [
    (["a", "b"], [1, 2, 3]),
    ([1, 2, 3], [4, 5, 6], [False, True], [None, 7]),
    ([1, 1.5], [[1], [2]], range(5), range(3), "xy"),
]


@pytest.mark.parametrize("dimensions", SHAPES)
def test_any_two_values_meet_in_a_case_of_the_product(dimensions):
    cases = pairwise(*dimensions)
    assert all(case in list(product(*dimensions)) for case in cases)
    for (first, ones), (second, others) in combinations(enumerate(dimensions), 2):
        for pair in product(ones, others):
            assert any((case[first], case[second]) == pair for case in cases), pair


def test_few_cases_suffice():
    assert len(pairwise(range(3), range(3), range(2), range(2))) == 9
    assert len(pairwise(range(3), range(2), range(5), range(3), range(2))) <= 18
    assert pairwise(*SHAPES[1]) == pairwise(*SHAPES[1])
