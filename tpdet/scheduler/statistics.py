"""What the scheduler counts, as one frozen snapshot."""

import msgspec


class Totals(msgspec.Struct, kw_only=True):
    """Running totals since the start; the scheduler adds to them.

    `prompt_tokens` counts each prompt once; `computed_tokens` counts every position that a step
    computed, recomputation and each choice's own copy included.
    """

    requests_added: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0


class SchedulerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How things stand, and the totals since the start.

    A request is waiting until one of its choices has been given pages; after that it is running,
    also while preempted. `requests_finished` are those that ended with an answer.
    """

    requests_running: int
    requests_waiting: int
    requests_finished: int
    sequences_running: int
    sequences_waiting: int
    pages_used: int
    pages_free: int
    steps: int
    preemptions: int
    totals: Totals
