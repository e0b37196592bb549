"""Fault points of the step loop, for tests: they cause the faults of `launch.life.faults`."""

import os
import resource
import signal
import threading
from collections.abc import Sequence

import msgspec
import torch

from tpdet.control.plan import DIGEST_BYTES, StepPlan
from tpdet.launch.life.faults import Fault
from tpdet.runner import LogitBlock, TakeLogits

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}


class FaultPoints:
    """One rank's faults, in the order of their steps; each happens once."""

    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        of_rank = [fault for fault in faults if fault.rank == rank]
        self._waiting = sorted(of_rank, key=lambda fault: fault.step)

    def meet(self, plan: StepPlan, results: TakeLogits) -> tuple[StepPlan, TakeLogits]:
        """Cause the faults due at this plan; the plan and the results to go on with."""
        for fault in [fault for fault in self._waiting if fault.step <= plan.step]:
            if fault.action == "nan-row" and not plan.rows.logits.any():
                continue  # nothing to spoil yet
            self._waiting.remove(fault)
            if fault.action == "nan-row":
                results = _SpoilFirstRow(results)
            elif fault.action == "diverge":
                plan = msgspec.structs.replace(plan, table_digest=bytes(DIGEST_BYTES))
            else:
                happen(fault.action)
        return plan, results


def happen(action: str) -> None:
    """Cause one fault in this process. Raises ValueError for an unknown action."""
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
    elif action == "hang":
        threading.Event().wait()
    elif action == "disk-full":
        # The signal would end the process; ignored, a write fails as on a full disk (EFBIG).
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    elif action == "slow-log":
        _stall_standard_error()
    else:
        raise ValueError(f"no such fault: {action}")


def _stall_standard_error() -> None:
    """Put a full pipe in its place; the reading end stays open and unread."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"\n" * 4096)
    except BlockingIOError:
        pass
    os.set_blocking(writer, True)
    os.dup2(writer, 2)


class _SpoilFirstRow:
    """Takes logits whose first row it has made NaN."""

    def __init__(self, results: TakeLogits) -> None:
        self._results = results

    def take(self, block: LogitBlock) -> torch.Tensor:
        """As TakeLogits."""
        if block.first == 0:
            block = block._replace(logits=block.logits.clone())
            block.logits[0] = float("nan")
        return self._results.take(block)
