"""Figures of the default fold order, and of another order where that was not measured."""

from collections.abc import Iterable
from typing import Any

from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS
from tpdet.tools.measurement.results_file import CASE, Row, Run


def in_default_order(found: Iterable[tuple[Run, list[Row]]]) -> list[tuple[Run, Row]]:
    """Choose for each case the row of the default fold order, else the newest of another order.

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


def _is_default(held: tuple[Run, Row] | None) -> bool:
    return held is not None and held[1]["mode"] == DEFAULT_FOLD_ORDER
