"""`python -m tests.fuzz SEED COUNT FAMILY ...`: COUNT requests or more of each family, a verdict.

Every request is asked alone, streamed, and in crowds with cancels in every configuration of
`crowds.CONFIGURATIONS`, and must have one answer, bit for bit. What is drawn depends on SEED alone;
`--crowd` runs one crowd of it again.
"""

import argparse
import hashlib
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz.crowds import CONFIGURATIONS, Found, Fuzzer
from tests.fuzz.draws import crowd_of
from tests.fuzz.models import FAMILIES
from tests.fuzz.planted import FAULTS
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.launch.life.signals import raising
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine


def crowds_of(seed: int, family: str, count: int) -> list[int]:
    """The numbers of the first crowds that have `count` requests together."""
    numbers, total = [], 0
    while total < count:
        numbers.append(len(numbers))
        total += len(crowd_of(seed, family, numbers[-1]))
    return numbers


def rows_of(seed: int, family: str, numbers: list[int], found: dict[str, Found]) -> list[dict]:
    """The rows of a results file: one a configuration."""
    bodies = [crowd_of(seed, family, n) for n in numbers]
    drawn = hashlib.sha256(json.dumps(bodies).encode()).hexdigest()
    return [
        {
            "case": name,
            "model": family,
            "dtype": "float32",
            "mode": DEFAULT_FOLD_ORDER,
            "tp": one.tp,
            "seed": seed,
            "requests": sum(map(len, bodies)),
            "drawn": drawn,
            "compared": one.compared,
            "equal": not one.differences,
            "different": len(one.differences),
            "given_up": one.given_up,
            "ways": dict(sorted(one.ways.items())),
            **one.counted,
        }
        for name, one in found.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    """0 where all is equal, else 1."""
    options = _options(arguments)
    began, rows = time.monotonic(), []
    with raising(), tempfile.TemporaryDirectory(prefix="tpdet-fuzz-") as name:
        for family in options.families:
            tell = lambda line: print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)
            crowds = [options.crowd]
            if options.crowd is None:
                crowds = crowds_of(options.seed, family, options.count)
            fuzzer = Fuzzer(options.seed, family, Path(name), tell, options.planted)
            found = fuzzer.run(crowds, tuple(options.only))
            rows += rows_of(options.seed, family, crowds, found)
            for row in rows[-len(found) :]:
                tell(_line(row))
    if options.output is not None:
        command = shlex.join(["python", "-m", "tests.fuzz", *(arguments or sys.argv[1:])])
        where = machine("auto", max(row["tp"] for row in rows))
        append_run(options.output, "fuzz", where, command, rows)
    different = sum(row["different"] for row in rows)
    print(f"{sum(row['compared'] for row in rows)} compared, {different or 'none'} different")
    return 1 if different else 0


def _line(row: dict[str, Any]) -> str:
    counted = ("preemptions", "draft_tokens", "accepted_tokens", "cached_tokens", "given_up")
    said = ", ".join(f"{row.get(name, 0)} {name.replace('_', ' ')}" for name in counted)
    verdict = "equal" if row["equal"] else f"{row['different']} DIFFERENT"
    return f"{row['model']}, {row['case']}: {row['compared']} compared, {verdict}; {said}"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", allow_abbrev=False)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, help="requests of each family, at least")
    parser.add_argument(
        "families", nargs="*", default=list(FAMILIES), choices=FAMILIES, metavar="FAMILY"
    )
    parser.add_argument("--crowd", type=int, help="this one alone")
    parser.add_argument("--only", action="append", default=[], choices=list(CONFIGURATIONS))
    parser.add_argument("--planted", default="", choices=list(FAULTS), help="a fault to be found")
    parser.add_argument("--output", type=Path, help="results file or folder to append a run to")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
