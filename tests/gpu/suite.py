"""A GPU suite: checks side by side in processes of their own, and the file of their rows."""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import triton

from tests.gpu.checks import failures, outcome
from tpdet.verify.machine import machine
from tpdet.verify.report import append_run

_LIMIT = 400.0  # seconds that a check may take


@dataclass(frozen=True)
class Check:
    """One check by name: a function of a module and what it is called with."""

    name: str
    function: Callable
    arguments: tuple = ()


def side_by_side(checks: Sequence[Check], workers: int) -> list[dict]:
    """Rows of all checks, in order: compiling takes most of the time, so they run at once."""
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(_in_a_process, checks))


def _in_a_process(check: Check) -> dict:
    """A check's row; a process that dies or hangs is a failed check and no other's concern."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcome, args=(theirs, check))
    process.start()
    theirs.close()
    try:
        if not mine.poll(_LIMIT):
            raise TimeoutError(f"no answer in {_LIMIT:.0f} s")
        return mine.recv()
    except (EOFError, TimeoutError) as error:
        said = str(error) or "the process died"
        print(f"FAIL  {check.name}: {said}", flush=True)
        return {"case": check.name, "equal": False, "error": said}
    finally:
        process.kill()
        process.join()


def _send_outcome(pipe: Connection, check: Check) -> None:
    pipe.send(outcome(check.name, check.function, *check.arguments))


def run_suite(
    name: str,
    checks: Callable[[], Sequence[Check]],
    others: dict[str, Callable[[], object]],
    arguments: Sequence[str],
    default: Sequence[str] = ("bits", "times"),
) -> int:
    """`python -m tests.gpu.<name> [part ...] [--output FILE.json]`; 1 when a check failed.

    The part "bits" runs `checks`, whose rows are appended to `--output`; `others` are other parts.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.gpu.{name}", allow_abbrev=False)
    parser.add_argument("parts", nargs="*", default=list(default), help=f"bits {' '.join(others)}")
    parser.add_argument("--output", type=Path, help="results file (JSON) to append bits to")
    parser.add_argument("--only", default="", help="checks whose name holds this")
    parser.add_argument("--workers", type=int, default=10, help="checks that run at once")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - {"bits", *others}:
        parser.error(f"there is no part {sorted(unknown)}")
    print(torch.cuda.get_device_name(), torch.__version__, "triton", triton.__version__, flush=True)
    begin, failed = time.time(), []
    if "bits" in options.parts:
        chosen = [check for check in checks() if options.only in check.name]
        rows = side_by_side(chosen, options.workers)
        failed = [row["case"] for row in rows if not row["equal"]]
        print(f"bits: {len(rows) - len(failed)} of {len(rows)} ok, {time.time() - begin:.0f} s")
        if options.output is not None:
            tagged = [{**row, "case": f"{name}: {row['case']}"} for row in rows]
            command = f"python -m tests.gpu.{name} bits"
            append_run(options.output, "bits", machine("cuda", 1), command, tagged)
    for part in others:
        if part in options.parts:
            others[part]()
    failed += failures
    print(f"{time.time() - begin:.0f} s, failed: {', '.join(failed) or 'nothing'}", flush=True)
    return 1 if failed else 0
