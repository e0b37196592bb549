"""Pairwise covering sets: a few cases in which any two values of two dimensions meet."""

from itertools import combinations, product


def pairwise(*dimensions):
    """Some cases of the product of `dimensions` (lists of values), the same in every run.

    Every two values of two different dimensions are together in one of them. A fault that one
    value or two values cause is met; one that only three of them cause may be missed.
    """
    cases = [tuple(enumerate(case)) for case in product(*(range(len(d)) for d in dimensions))]
    missing = {pair for case in cases for pair in combinations(case, 2)}
    chosen = []
    while missing:
        case = max(cases, key=lambda case: len(missing.intersection(combinations(case, 2))))
        missing.difference_update(combinations(case, 2))
        chosen.append(tuple(dimensions[which][value] for which, value in case))
    return chosen
