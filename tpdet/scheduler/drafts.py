"""Drafts: tokens that somebody believes will follow, added to a decoding sequence's row.

The step samples at every position of such a row by the ordinary rule, so no draft can change an
answer (docs/drafts.md). Only rank 0 drafts, and a drafter need not be deterministic.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows

from tpdet.errors import RequestError
from tpdet.scheduler.sequence import Sequence

Drafter = Callable[[Sequence, int], Rows[int]]
"""What may follow the tokens of a sequence: at most so many ids, all of the vocabulary."""


def own_drafts(sequence: Sequence, most: int) -> Rows[int]:
    """The next of the request's own drafts, as long as the output equals them."""
    output = len(sequence.tokens) - sequence.prompt_length
    since = sequence.followed
    new = sequence.tokens[sequence.prompt_length + since :]
    if output >= len(sequence.drafts) or new != list(sequence.drafts[since:output]):
        sequence.stop_drafting()
        return ()
    sequence.followed = output
    return sequence.drafts[output : output + most]


def add_drafts(sequence: Sequence, drafter: Drafter, budget: int) -> int:
    """Put at most `budget` drafts behind the tokens of a decoding sequence; how many.

    The drafts end before an id that would end the sequence and before the first that its schema
    forbids. They leave room for the token that follows them, and fit the pages that it holds.
    """
    known = len(sequence.tokens)
    most = min(budget, sequence.room - known, sequence.full_length - 1 - known)
    if most <= 0:
        return 0
    for draft in drafter(sequence, most)[:most]:
        if draft in sequence.ends or not _allows(sequence, draft):
            break
        sequence.tokens.append(draft)
    sequence.drafted = len(sequence.tokens) - known
    return sequence.drafted


def _allows(sequence: Sequence, draft: int) -> bool:
    """Whether the schema allows `draft` after the tokens; not where it reaches a limit."""
    try:
        following = sequence.next_ids(len(sequence.tokens))
    except RequestError:
        return False
    return following is None or bool(following.allowed[draft >> 3] >> (draft & 7) & 1)
