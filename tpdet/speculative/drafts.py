"""Drafts behind the tokens of a decoding sequence: how many fit, and where they end.

The step samples at every position of such a row by the ordinary rule, so no draft can change an
answer (docs/drafts.md).
"""

from collections.abc import Sequence as Rows

from tpdet.errors import RequestError
from tpdet.scheduler.sequence import Sequence


def room_for_drafts(sequence: Sequence) -> int:
    """Drafts that fit the sequence's pages, and leave room for the token that follows them."""
    known = len(sequence.tokens)
    return max(0, min(sequence.room - known, sequence.full_length - 1 - known))


def add_drafts(sequence: Sequence, drafts: Rows[int]) -> int:
    """Put drafts behind the tokens of a decoding sequence, which has room for them; how many.

    They end before an id that would end the sequence and before the first that its schema forbids.
    """
    known = len(sequence.tokens)
    if sequence.constraint is None and sequence.ends.isdisjoint(drafts):  # the usual case
        sequence.tokens += drafts
        drafts = ()
    for draft in drafts:
        if draft in sequence.ends or not _allows(sequence, draft):
            break
        sequence.tokens.append(draft)
    sequence.drafted = len(sequence.tokens) - known
    return sequence.drafted


def stop_drafting(sequence: Sequence) -> None:
    """Let a sequence go on without drafts, so that its next rows may be planned ahead."""
    sequence.drafters = []
    sequence.wait_for_drafts(False)


def _allows(sequence: Sequence, draft: int) -> bool:
    """Whether the schema allows `draft` after the tokens; not where it reaches a limit."""
    try:
        following = sequence.next_ids(len(sequence.tokens))
    except RequestError:
        return False
    return following is None or bool(following.allowed[draft >> 3] >> (draft & 7) & 1)
