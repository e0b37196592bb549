"""All measured times as JSON lines, winners and losers: what the static choice is fitted on."""

import json
from collections.abc import Mapping
from pathlib import Path

from tpdet.tools.tune.product import Tuned


def append_times(path: Path, environment: Mapping[str, str], tuned: Tuned) -> None:
    """Add a line for a product: microseconds of the peer and of every candidate, by its bucket.

    Raises OSError for a file that cannot be written.
    """
    product = tuned.product
    line = {
        "gpu": environment["gpu"],
        "kind": product.kind,
        "n": product.n,
        "k": product.k,
        "leaves": product.leaves,
        "roots": product.roots,
        "peer_us": {str(rows): round(row.peer_us, 2) for rows, row in tuned.rows.items()},
        "us": {str(rows): _rounded(times) for rows, times in tuned.times.items()},
        "refused": tuned.refused,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(us, 2) for name, us in times.items()}
