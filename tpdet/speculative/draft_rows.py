"""Drafts behind the tokens of decoding sequences: how many fit, and where they end.

The step samples at every position of such a row by the ordinary rule, so no draft can change an
answer (docs/speculative.md).
"""

from collections import abc

from tpdet.cache.state_table import last_draft_end
from tpdet.control.plan import MAX_STEP_DRAFTS
from tpdet.control.row_messages import RowKey
from tpdet.errors import RequestError
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.scheduler.sequence import Sequence, follow_drafts, unverified_drafts

_BESIDE_PROMPTS = 24
"""Rows with drafts in a step with prompts or with rows over `SHORT_TOKENS`: graphs fit so many."""

Proposal = tuple[Sequence, abc.Callable[[int], abc.Sequence[int]]]
"""A sequence, and what gives at most so many drafts for it.

Where a pending step verifies drafts of it, the token that is expected behind these, then drafts.
"""


def decodes(sequence: Sequence) -> bool:
    """Whether only the last token of a sequence, which it generated, is to be computed."""
    return sequence.remaining == 1 and len(sequence.tokens) > sequence.prompt_length


def room_for_drafts(sequence: Sequence) -> int:
    """Drafts that fit the sequence's pages, and leave room for the token that follows them.

    And its slot of linear-attention states, which takes rows of two chunks. Behind unverified
    drafts they fit wherever the row begins, which is then a short one.
    """
    known, end = len(sequence.tokens), min(sequence.room, sequence.full_length - 1)
    if sequence.states is not None:
        end = min(end, last_draft_end(known - 1))
    if unverified_drafts(sequence):
        return max(0, min(end - known - 1, SHORT_TOKENS - 1))
    return max(0, end - known)


def step_room(counts: dict[RowKey, int], budget: int, known: int = 0) -> int:
    """Drafts that a step with these rows may carry, as many as are left of its token budget.

    No more than the graph of a step with drafts has rows for: without prompts and longer rows
    `HEAD_ROWS`, unless more `known` drafts than that, of requests, are to be verified.
    """
    graph = HEAD_ROWS - len(counts) if max(counts.values()) == 1 else budget
    graph = budget if known > HEAD_ROWS else graph
    return min(budget, MAX_STEP_DRAFTS, graph)


def fill_rows(
    proposals: abc.Sequence[Proposal], counts: dict[RowKey, int], budget: int
) -> list[Sequence]:
    """Add drafts in this order while the budget lasts; the sequences that it did not last for.

    Beside rows with many tokens only few rows carry drafts, as attention has little room for each.
    counts: the tokens of each row of the step, which grow by the drafts.
    """
    all_short = max(counts.values()) == 1
    drafted, left = 0, []
    for sequence, propose in proposals:
        few, room = drafted < _BESIDE_PROMPTS, room_for_drafts(sequence)
        if room and (budget <= 0 or not (few or all_short)):
            left.append(sequence)
            continue
        most = min(budget if few else min(budget, SHORT_TOKENS - 1), room)
        if most <= 0:
            continue
        if unverified_drafts(sequence):
            added = _expect(sequence, propose(most + 1)[: most + 1])
        else:
            added = _add_drafts(sequence, propose(most)[:most])
        counts[sequence.key] += added
        budget -= added
        drafted += added > 0
        all_short &= added < SHORT_TOKENS
    return left


def _expect(sequence: Sequence, following: abc.Sequence[int]) -> int:
    """Have the next row follow unverified drafts; it has as many drafts wherever it begins."""
    ends = (index for index, draft in enumerate(following) if draft in sequence.ends)
    following = following[: next(ends, len(following))]
    follow_drafts(sequence, following)
    return max(0, len(following) - 1)


def _add_drafts(sequence: Sequence, drafts: abc.Sequence[int]) -> int:
    """Put drafts behind the tokens of a decoding sequence, which has room for them; how many.

    They end before an id that would end the sequence and before the first that its schema forbids.
    """
    if sequence.constraint is None and sequence.ends.isdisjoint(drafts):  # the usual case
        sequence.add_drafts(drafts)
        return len(drafts)
    for draft in drafts:
        if draft in sequence.ends or not _allows(sequence, draft):
            break
        sequence.add_drafts((draft,))
    return sequence.drafted


def _allows(sequence: Sequence, draft: int) -> bool:
    """Whether the schema allows `draft` after the tokens; not where it reaches a limit."""
    try:
        following = sequence.next_ids(len(sequence.tokens))
    except RequestError:
        return False
    return following is None or bool(following.allowed[draft >> 3] >> (draft & 7) & 1)
