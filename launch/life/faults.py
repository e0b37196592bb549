"""Fault injection for tests: parses which fault happens, at which rank and step.

TPDET_FAULTS holds faults separated by ";", each "rank=R,step=S,action=A" with exactly these
fields, in this order. A fault happens once, at the first plan of step S or later. Only a server
started with --allow-faults reads the variable. Anywhere else it is an error, so that no fault stays
behind in an environment.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tpdet.errors import UsageError

FAULTS_VARIABLE = "TPDET_FAULTS"
ACTIONS = {
    "kill": "the rank ends by SIGKILL",
    "stop": "the rank is held by SIGSTOP",
    "segv": "the rank ends by SIGSEGV",
    "hang": "the rank's main thread sleeps for ever",
    "diverge": "the plan's page table digest is not this rank's",
    "nan-row": "the first row of logits of the next step that has some is NaN (rank 0 only)",
    "disk-full": "every write of the rank to a file fails from now on",
    "slow-log": "the rank's standard error is a full pipe that nobody reads",
}
MAX_FAULTS = 16
_FAULT = re.compile(r"rank=(\d{1,4}),step=(\d{1,9}),action=([a-z-]+)", re.ASCII)


@dataclass(frozen=True)
class Fault:
    """One thing to go wrong."""

    rank: int
    step: int
    action: str


def read_faults(allowed: bool, environ: Mapping[str, str] | None = None) -> tuple[Fault, ...]:
    """The faults that TPDET_FAULTS asks for. Raises UsageError if it is not allowed or wrong."""
    text = (os.environ if environ is None else environ).get(FAULTS_VARIABLE)
    if text is None:
        return ()
    if not allowed:
        raise UsageError(
            f"{FAULTS_VARIABLE} is set: unset it, or, on a server that only tests use, start with "
            "--allow-faults"
        )
    parts = text.split(";")
    if len(parts) > MAX_FAULTS:
        raise UsageError(f"{FAULTS_VARIABLE} holds {len(parts)} faults; at most {MAX_FAULTS}")
    return tuple(_parse(part) for part in parts)


def refuse_faults() -> None:
    """Raise UsageError if TPDET_FAULTS is set where nothing honours it."""
    read_faults(allowed=False)


def _parse(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{FAULTS_VARIABLE} holds {text[:100]!r}, not rank=R,step=S,action=A (several are "
            "separated by ;)"
        )
    fault = Fault(int(match[1]), int(match[2]), match[3])
    if fault.action not in ACTIONS:
        raise UsageError(
            f"{FAULTS_VARIABLE}: unknown action {fault.action!r}; one of {', '.join(ACTIONS)}"
        )
    if fault.action == "nan-row" and fault.rank != 0:
        raise UsageError(f"{FAULTS_VARIABLE}: nan-row is for rank 0, which samples the tokens")
    return fault
