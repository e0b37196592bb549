"""One rank of a benchmark's world: `-m tpdet.tools.bench.rank SPEC RESULT`."""

import sys
from importlib import import_module
from pathlib import Path

import msgspec

from tpdet.tools.bench.spec import Spec
from tpdet.tools.worlds.worlds import run_rank


def main(arguments: list[str]) -> int:
    """Do the work of the spec; the rank that has a result, rank 0, writes it."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Spec)
    result = import_module(f"tpdet.tools.bench.{spec.module}").measure(spec)
    if result is not None:
        Path(arguments[1]).write_bytes(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_rank(main))
