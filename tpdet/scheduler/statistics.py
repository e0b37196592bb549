"""The scheduler's counters and gauges, as one frozen snapshot."""

import msgspec

from tpdet.scheduler.policy import Policy
from tpdet.scheduler.speculator import DraftCounts
from tpdet.scheduler.state_slots import StateCounts


class Totals(msgspec.Struct, kw_only=True):
    """Running totals since the start; the scheduler adds to them.

    `prompt_tokens` counts each prompt once. `computed_tokens` counts every position that a step
    computed, recomputed ones and each choice's own copy included. `prefix_query_tokens` were
    looked up in the prefix cache and `prefix_hit_tokens` were found there, each time a sequence
    began to run. `batches` counts the steps with rows and `batched_rows` their rows, so the mean
    batch size is `batched_rows / batches`. `draft_tokens` were verified, and the token that was
    sampled equals the draft for `accepted_draft_tokens` of them.
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
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class SchedulerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The present state, and the totals since the start.

    A request is waiting until one of its choices gets pages; after that it is running, also while
    preempted. `requests_finished` counts the requests that ended with an answer. A page is used (a
    sequence holds it) or free; `pages_cached` of the free ones are kept by the prefix cache.
    `drafters`: drafts that were verified, by drafter. `states`: slots of linear-attention states;
    None for a model without such layers.
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
    drafters: dict[str, DraftCounts]
    states: StateCounts | None = None


def take_statistics(
    policy: Policy,
    live: int,
    waiting: int,
    steps: int,
    totals: Totals,
    drafters: dict[str, DraftCounts],
) -> SchedulerStatistics:
    """The snapshot of a scheduler with `live` requests, `waiting` of which never had a page."""
    pages = policy.page_manager
    prefixes = pages.prefixes
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
        sequences_running=len(policy.running),
        sequences_waiting=len(policy.waiting),
        pages_used=pages.num_pages - pages.free_count,
        pages_free=pages.free_count,
        pages_cached=prefixes.index.idle_count,
        steps=steps,
        preemptions=policy.preemptions,
        totals=totals,
        drafters=drafters,
        states=None if pages.states is None else pages.states.counts,
    )
