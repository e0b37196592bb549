"""A server of one rank with a fault: `python -m tests.fuzz.planted FAULT FLAG ...`.

The fuzzer has to find each of them.
"""

import sys
from collections.abc import Callable

from tpdet import serve
from tpdet.scheduler import pending_steps
from tpdet.scheduler import results as scheduler_results
from tpdet.scheduler.policy import Policy


def _accept_blindly() -> None:
    """A draft is taken for right without a look at the token."""
    scheduler_results.follows_draft = lambda token, draft: True


def _move_noise_after_a_preemption() -> None:
    """A sequence that was preempted samples with the noise of the position behind its own."""
    preempt, row_params, moved = Policy.preempt, pending_steps.row_params, set()

    def preempting(policy, sequence):
        moved.add(id(sequence))
        preempt(policy, sequence)

    def moving(sequence, end):
        how = row_params(sequence, end)
        return how._replace(position=end + 1) if id(sequence) in moved else how

    Policy.preempt, pending_steps.row_params = preempting, moving


FAULTS: dict[str, Callable[[], None]] = {
    "blind-acceptance": _accept_blindly,
    "noise-after-preemption": _move_noise_after_a_preemption,
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(serve.main(sys.argv[2:]))
