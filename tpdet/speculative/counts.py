"""How many drafts were verified, and how many were right."""

import msgspec

PLACES = 16
"""Of a row, that are counted one by one."""


class DraftCounts(msgspec.Struct):
    """Drafts of one drafter: rows with them, their tokens, and how many of those were right.

    `accepted_at[i]` counts the rows whose draft i, from 0, was right; the first 16 only.
    `switched_off` is 1 once the drafter failed or took too long: it drafts no more.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = msgspec.field(default_factory=lambda: [0] * PLACES)
    switched_off: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Count a row with `drafted` drafts, of which the first `accepted` were right."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        for place in range(min(accepted, PLACES)):
            self.accepted_at[place] += 1
