"""The roster: who runs, who waits, and how many tokens each computes in a step.

The policy of the scheduler is here. A running sequence holds pages for all its known tokens.
"""

from tpdet.control.sampling_row import RowKey
from tpdet.errors import IntegrityError
from tpdet.scheduler.ledger import PageLedger
from tpdet.scheduler.line import Line
from tpdet.scheduler.sequence import Sequence, pages_for


class Roster:
    """The waiting and the running line, and the pages of the running.

    `others_per_absent`: a step ahead is planned without the sequences that wait for results, each
    of which then gets a token every second step, if so many others run for each of them. Ten:
    steps ahead save less than a tenth of a step's time, so that with more absent the batch would
    lose more than it gains; and its size, with which a step's time goes, swings by less than the
    tenth that operators are warned of.
    """

    others_per_absent = 10

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_pages: int,
        prefix_identity: bytes | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = Line()
        self.running = Line()
        self.ledger = PageLedger(num_pages, prefix_identity)
        self.preemptions = 0

    def choose(self) -> dict[RowKey, int]:
        """Tokens that each sequence of the next step computes, at least 1.

        Decodes come first, then prompts, then the waiting line, each in the total order. Nobody
        is admitted while a running sequence is left without a token, so there are never more of
        them than the budget has tokens. So a decoding sequence that keeps its pages is in every
        step, and between two of its tokens lies never more than one chunk of prompts. Who waits
        for results of a step in flight is absent, its token of the budget kept, and in the next.
        """
        self._secure_pages()
        takes, budget = self._share_budget()
        self._admit(takes, budget)
        return takes

    @property
    def may_run_ahead(self) -> bool:
        """Whether a step can be chosen before the last one's results are known."""
        missing = sum(sequence.missing_pages for sequence in self.running)
        absent = sum(sequence.awaits_results for sequence in self.running)
        others = len(self.running) - absent
        return missing <= self.ledger.free_count and absent * self.others_per_absent <= others

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it waits again, in its place, with its tokens kept."""
        self.running.remove(sequence)
        self.ledger.release(sequence)
        sequence.computed = 0
        if sequence.constraint is not None:
            sequence.constraint.forget()
        self.waiting.put(sequence)
        self.preemptions += 1

    def restart(self, prefix_identity: bytes | None) -> None:
        """Preempt everyone, empty the prefix cache for another identity, bump every page."""
        for sequence in reversed(list(self.running)):
            self.preempt(sequence)
        for sequence in self.waiting:
            sequence.chain = None  # its keys were made for the old identity
        self.ledger.reload(prefix_identity)

    def leave(self, sequence: Sequence) -> None:
        """Take a finished sequence off its line; its pages are the caller's to release."""
        if not self.running.remove(sequence) and not self.waiting.remove(sequence):
            raise IntegrityError(f"{sequence.key} leaves, but it neither runs nor waits")

    def check_integrity(self, leaving: list[Sequence]) -> None:
        """Refuse (IntegrityError) lines or pages that break an invariant.

        `leaving` are finished sequences that keep their pages until the step in flight ends.
        """
        self.running.check_integrity("running")
        self.waiting.check_integrity("waiting")
        for sequence in self.waiting:
            if sequence.pages or sequence.computed:
                raise IntegrityError(f"{sequence.key} waits but holds pages {sequence.pages}")
        for sequence in self.running:
            if pages_for(sequence.computed) > len(sequence.pages):
                raise IntegrityError(
                    f"{sequence.key} has computed {sequence.computed} positions but holds "
                    f"{len(sequence.pages)} pages"
                )
        self.ledger.check_integrity([*self.running, *leaving])

    def _secure_pages(self) -> None:
        """Give the running, in order, pages for all their tokens, at the cost of the latest.

        Pages run out one at a time, so the last victim's, less one, are what is free afterwards:
        too few for it to come back in the same step, unless it held copies of cached pages.
        """
        done = 0
        while done < len(self.running):
            sequence = self.running[done]
            if not sequence.missing_pages:  # nearly always: look no further
                done += 1
                continue
            if self.ledger.fits(sequence):
                self.ledger.grow(sequence)
                done += 1
                continue
            if len(self.running) == 1:
                raise IntegrityError(f"{sequence.key} runs alone and yet has no page to grow into")
            self.preempt(self.running[-1])

    def _share_budget(self) -> tuple[dict[RowKey, int], int]:
        """What each running sequence takes, and what is left of the budget."""
        takes: dict[RowKey, int] = {}
        prompts: list[tuple[RowKey, int]] = []
        budget = self.max_num_batched_tokens
        for sequence in self.running:
            remaining = sequence.remaining
            if sequence.awaits_results:
                budget -= 1
            elif remaining > 1:
                prompts.append((sequence.key, remaining))
            elif remaining and budget:
                takes[sequence.key] = 1
                budget -= 1
        for key, remaining in prompts:
            if budget:
                takes[key] = min(remaining, budget)
                budget -= takes[key]
        return takes, budget

    def _admit(self, takes: dict[RowKey, int], budget: int) -> None:
        """Let the waiting line in from its head while seats, `budget` and pages last."""
        while budget and len(self.waiting) and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self.ledger.admit(sequence):
                break
            self.waiting.remove(sequence)
            sequence.tokens_when_admitted = len(sequence.tokens)
            self.running.put(sequence)
            takes[sequence.key] = min(sequence.remaining, budget)
            budget -= takes[sequence.key]
