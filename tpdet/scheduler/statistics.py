"""What the scheduler counts, as one frozen snapshot."""

import msgspec

from tpdet.scheduler.roster import Roster


class Totals(msgspec.Struct, kw_only=True):
    """Running totals since the start; the scheduler adds to them.

    `prompt_tokens` counts each prompt once; `computed_tokens` counts every position that a step
    computed, recomputation and each choice's own copy included. `prefix_query_tokens` are those
    that were looked up in the prefix cache, `prefix_hit_tokens` those found, whenever a sequence
    was given pages: after a preemption again. `batches` are the steps that had rows,
    `batched_rows` their rows: the mean batch size is the one over the other.
    """

    requests_added: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    batches: int = 0
    batched_rows: int = 0


class SchedulerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How things stand, and the totals since the start.

    A request is waiting until one of its choices has been given pages; after that it is running,
    also while preempted. `requests_finished` are those that ended with an answer. A page is used
    (somebody holds it) or free; `pages_cached` of the free ones are kept for the prefix cache.
    """

    requests_running: int
    requests_waiting: int
    requests_finished: int
    sequences_running: int
    sequences_waiting: int
    pages_used: int
    pages_free: int
    pages_cached: int
    steps: int
    preemptions: int
    totals: Totals


def take_statistics(
    roster: Roster, live: int, waiting: int, steps: int, totals: Totals
) -> SchedulerStatistics:
    """The snapshot of a scheduler with `live` requests, `waiting` of which never had a page."""
    ledger = roster.ledger
    prefixes = ledger.prefixes
    totals = msgspec.structs.replace(
        totals,
        prefix_query_tokens=prefixes.query_tokens,
        prefix_hit_tokens=prefixes.hit_tokens,
    )
    return SchedulerStatistics(
        requests_running=live - waiting,
        requests_waiting=waiting,
        requests_finished=totals.requests_added
        - totals.requests_aborted
        - totals.requests_failed
        - live,
        sequences_running=len(roster.running),
        sequences_waiting=len(roster.waiting),
        pages_used=ledger.num_pages - ledger.free_count,
        pages_free=ledger.free_count,
        pages_cached=prefixes.index.idle_count,
        steps=steps,
        preemptions=roster.preemptions,
        totals=totals,
    )
