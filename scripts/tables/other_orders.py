"""What a table says of figures that were not measured in the default fold order."""

from collections import Counter
from collections.abc import Iterable

from tpdet.kernels.order import DEFAULT_FOLD_ORDER, DEFAULT_LEAVES, fold_plan


def other_orders(cases: Iterable[tuple[int, str]]) -> str:
    """What is to be said of cases (TP, fold order) that the default was not measured on; or "".

    By size and order: how many cases, and how what a rank sends there differs from the default's.
    """
    counted = Counter(cases)
    sizes = Counter(tp for tp, _ in counted.elements())
    parts = [
        f"TP {tp}, {count} of {sizes[tp]} cases in `{order}` ({_sent(order, tp)})"
        for (tp, order), count in sorted(counted.items())
        if order != DEFAULT_FOLD_ORDER
    ]
    if not parts:
        return ""
    return f"Not measured in the default order, `{DEFAULT_FOLD_ORDER}`: {'; '.join(parts)}."


def _sent(order: str, ranks: int) -> str:
    """Say how many partials of 8 leaves a rank sends at most, beside the default's."""
    theirs, ours = (fold_plan(name, DEFAULT_LEAVES, ranks) for name in (order, DEFAULT_FOLD_ORDER))
    if ranks == 1:
        return "nothing is sent and as much added in either"
    if [len(roots) for roots in theirs.roots] == [len(roots) for roots in ours.roots]:
        return f"a rank sends {ours.slots} partial and adds as much in either"
    return f"a rank sends up to {theirs.slots} partials there, {ours.slots} in the default"
