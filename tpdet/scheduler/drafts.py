"""Drafts: tokens that somebody believes will follow, added to a decoding sequence's row.

The step samples at every position of such a row by the ordinary rule, so no draft can change an
answer (docs/drafts.md). Only rank 0 drafts, and a drafter need not be deterministic.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows

from tpdet.errors import RequestError
from tpdet.scheduler.sequence import PENDING, Sequence

Drafter = Callable[[Sequence, int], Rows[int]]
"""What may follow the tokens of a sequence: at most so many ids, all of the vocabulary."""


def own_drafts(sequence: Sequence, most: int) -> Rows[int]:
    """What the request's own drafts foretell next; nothing while their place is not known.

    Meanwhile the sequence runs ahead, its last token still to be sampled. Where that is so when the
    place is found, it waits for that token first.
    """
    guess, tokens = sequence.guess, sequence.tokens
    assert guess is not None  # whoever asks has drafts
    pending = tokens[-1] == PENDING
    known = guess.follow(tokens, sequence.prompt_length, len(tokens) - pending)
    if guess.is_spent:
        sequence.stop_drafting()
    else:
        sequence.reads_results = known or sequence.reads_always
    return guess.next(most) if known and not pending else ()


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
