"""Figures of the default fold order, and of another order where that was not measured."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tpdet.kernels.order import DEFAULT_FOLD_ORDER, DEFAULT_LEAVES, FOLD_ORDERS, fold_plan
from tpdet.tools.bench.report.results import CASE, Row, Run


def in_default_order(found: Iterable[tuple[Run, list[Row]]]) -> list[tuple[Run, Row]]:
    """Of each case the row of the default fold order, else the newest one of another order.

    `found` is what `newest_rows` gives. Approximate arithmetic, gathered row layers and modes that
    name a transport are left out; a row's `mode` says which order it was measured in.
    """
    chosen: dict[tuple[Any, ...], tuple[Run, Row]] = {}
    for run, rows in found:
        for row in rows:
            if row.get("mode") not in FOLD_ORDERS:
                continue
            key = tuple(row.get(name) for name in CASE if name != "mode")
            if row["mode"] == DEFAULT_FOLD_ORDER or not _is_default(chosen.get(key)):
                chosen[key] = run, row
    return list(chosen.values())


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
    """Of 8 leaves: partials that a rank sends, at most, beside those of the default."""
    theirs, ours = (fold_plan(name, DEFAULT_LEAVES, ranks) for name in (order, DEFAULT_FOLD_ORDER))
    if ranks == 1:
        return "nothing is sent and as much added in either"
    if [len(roots) for roots in theirs.roots] == [len(roots) for roots in ours.roots]:
        return f"a rank sends {ours.slots} partial and adds as much in either"
    return f"a rank sends up to {theirs.slots} partials there, {ours.slots} in the default"


def _is_default(held: tuple[Run, Row] | None) -> bool:
    return held is not None and held[1]["mode"] == DEFAULT_FOLD_ORDER
