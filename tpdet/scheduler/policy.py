"""The scheduling policy: which sequences run, which wait, and how many tokens each computes.

A running sequence holds pages for all its known tokens; a waiting one holds none.
"""

from collections import abc
from itertools import chain

from tpdet.cache.state_table import StateRoom
from tpdet.control.row_messages import RowKey
from tpdet.errors import IntegrityError
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.scheduler.page_manager import PageManager
from tpdet.scheduler.prompt_budget import WAITING_STEPS, PromptBudget, WaitingPrompts
from tpdet.scheduler.queue import SequenceQueue
from tpdet.scheduler.sequence import (
    Sequence,
    awaits_known_answer,
    known_drafts,
    pages_for,
)
from tpdet.scheduler.state_slots import StateSlots

OTHERS_PER_ABSENT = 10
"""Least other running sequences for each that sits out a step which is planned ahead."""
ROWS_AHEAD = HEAD_ROWS
"""Least rows of such a step where those that sit it out have drafts of their own verified."""


def decodes_freely(running: abc.Iterable[Sequence]) -> bool:
    """Whether sequences fit one graph, and each samples by its logits and a few numbers alone."""
    sequences = list(running)
    return len(sequences) <= HEAD_ROWS and all(
        it.may_follow and it.remaining <= 1 and len(it.tokens) - it.drafted >= it.free_from
        for it in sequences
    )


class Policy:
    """The waiting and the running queue, and the pages of the running sequences.

    A step that is planned ahead leaves out the sequences that wait for results; each of them then
    gets a token every second step. `others_per_absent` is the least number of other running
    sequences for each one left out. It is ten: planning ahead saves less than a tenth of a step's
    time, so with more sequences absent the batch would lose more than it gains. It also keeps the
    batch size, and with it the step time, from swinging by the tenth that operators are warned of.
    """

    others_per_absent = OTHERS_PER_ABSENT

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_pages: int,
        prefix_identity: bytes | None = None,
        state_room: StateRoom | None = None,
    ) -> None:
        """state_room: for linear-attention states; None for a model without such layers."""
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.mixed_step_tokens = max_num_batched_tokens
        """Tokens of a step in which sequences decode: readers wait for the prompts beside them."""
        self.prompt_budget: PromptBudget | None = None
        """Cuts prompts finer than that while sequences decode; None: nothing does."""
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        states = None if state_room is None else StateSlots(*state_room)
        self.page_manager = PageManager(num_pages, prefix_identity, states)
        self.preemptions = 0

    def choose(self) -> tuple[dict[RowKey, int], int]:
        """How many tokens each sequence of the next step computes, at least 1; the budget's rest.

        Decoding sequences come first, then prompts, then the waiting queue, each in the total
        order. No sequence is admitted while a running one gets no token, so never more sequences
        run than the budget has tokens. A decoding sequence that keeps its pages is therefore in
        every step, and at most one chunk of prompts lies between two of its tokens. A sequence
        that waits for results sits this step out (its token stays reserved) and joins the next.
        """
        self._secure_pages()
        counts, budget = self._share_budget()
        return counts, self._admit(counts, budget)

    def follow_drafts(self) -> None:
        """Say which sequences may have rows behind unverified drafts in a step planned ahead.

        None where that step has other than short decode rows, or one that samples by lists of ids.
        """
        drafted = [sequence for sequence in self.running if sequence.drafted]
        if not drafted:
            return
        admits = len(self.waiting) > 0 and len(self.running) < self.max_num_seqs
        all_do = not admits and decodes_freely(self.running)
        for sequence in drafted:
            few = sequence.drafted < SHORT_TOKENS
            sequence.follows = all_do and few and not sequence.waits

    @property
    def may_run_ahead(self) -> bool:
        """Whether a step may be planned before the results of the last one are known.

        Sequences whose own drafts are being verified lose nothing where others have enough to do.
        """
        missing = sum(sequence.missing_pages for sequence in self.running.lacking_pages())
        absent = [s for s in self.running if s.reads_results and s.awaits_results]
        others = (len(self.running) - len(absent)) // max(self.others_per_absent, 1)
        if missing > self.page_manager.free_count:
            return False
        if len(absent) <= others or not self.others_per_absent:
            return True
        readers = sum(not awaits_known_answer(sequence) for sequence in absent)
        return readers <= others and self._has_known_rows()

    def _has_known_rows(self) -> bool:
        """Whether a step ahead would verify drafts of requests, and fill up with prompts."""
        drafts = sum(map(known_drafts, self.running))
        rows = drafts
        for sequence in chain(self.running, self.waiting):
            if not drafts or rows >= ROWS_AHEAD:
                break
            rows += max(sequence.remaining - 1, 0)
        return rows >= ROWS_AHEAD

    def preempt(self, sequence: Sequence) -> None:
        """Take the pages of a running sequence, which keeps its tokens and waits again."""
        self.running.remove(sequence)
        self.page_manager.release(sequence)
        sequence.forget_computed()
        self.waiting.put(sequence)
        self.preemptions += 1

    def restart(self, prefix_identity: bytes | None, keep_keys: bool = False) -> None:
        """Preempt all sequences, empty the prefix cache for another identity, bump every page.

        keep_keys: sequences that have tokens already go on with their pages, which they alone read
        from now on. No page is bumped then.
        """
        for sequence in reversed(list(self.running)):
            if keep_keys and len(sequence.tokens) > sequence.prompt_length:
                sequence.has_old_keys = True
            else:
                self.preempt(sequence)
        for sequence in self.waiting:
            sequence.prefix.chain = None  # its keys belong to the old identity
        self.page_manager.reload(prefix_identity, list(self.running))

    def remove(self, sequence: Sequence) -> None:
        """Take a finished sequence out of its queue; the caller releases its pages."""
        if not self.running.remove(sequence) and not self.waiting.remove(sequence):
            raise IntegrityError(f"{sequence.key} leaves, but it neither runs nor waits")

    def check_integrity(self, finished: list[Sequence]) -> None:
        """Refuse (IntegrityError) queues or pages that break an invariant.

        finished: ended sequences that keep their pages until a pending step is committed.
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
        self.page_manager.check_integrity([*self.running, *finished])

    def _secure_pages(self) -> None:
        """Give the running sequences, in order, pages for all their tokens; preempt the latest.

        Pages run out one at a time, so afterwards the pages of the last victim, less one, are free.
        That is too few for it to run again in this step, unless it held copies of cached pages.
        """
        if not self.running.lacking_pages():  # the usual case
            return
        done = 0
        while done < len(self.running):
            sequence = self.running[done]
            if not sequence.missing_pages:
                done += 1
                continue
            if self.page_manager.fits(sequence):
                self.page_manager.grow(sequence)
                done += 1
                continue
            if len(self.running) == 1:
                raise IntegrityError(f"{sequence.key} runs alone and yet has no page to grow into")
            self.preempt(self.running[-1])

    def _share_budget(self) -> tuple[dict[RowKey, int], int]:
        """How many tokens each running sequence computes, and the rest of the budget."""
        counts: dict[RowKey, int] = {}
        prompts: list[tuple[Sequence, int]] = []
        budget, keys, depth = self.max_num_batched_tokens, 0, 0
        for sequence in self.running:
            known = len(sequence.tokens)
            remaining = known - sequence.computed if known < sequence.full_length else 0
            if sequence.drafted:
                remaining = 1
            if sequence.reads_results and sequence.awaits_results:
                budget -= 1
                keys += known
            elif remaining > 1:
                prompts.append((sequence, remaining))
                depth = sequence.computed if len(prompts) == 1 else depth
            elif remaining and budget:
                counts[sequence.key] = 1
                budget -= 1
                keys += known
        decoding = self.max_num_batched_tokens - budget
        if decoding:
            rows = self.mixed_step_tokens
            if self.prompt_budget is not None and (prompts or len(self.waiting)):
                waiting = self._waiting_prompts([it for _, it in prompts], depth)
                rows = self.prompt_budget.rows(decoding, keys, waiting, rows)
            budget = max(0, min(budget, rows - decoding))
        for sequence, _ in prompts:
            if budget:
                counts[sequence.key] = min(sequence.remaining, budget)
                budget -= counts[sequence.key]
        return counts, budget

    def _waiting_prompts(self, running: list[int], depth: int) -> WaitingPrompts:
        """Tokens that prompts lack: of running ones, of which the first has `depth`, and others.

        Those are counted until more would change no step.
        """
        total, most = sum(running), WAITING_STEPS * self.mixed_step_tokens
        for sequence in self.waiting:
            if total >= most:
                break
            total += sequence.remaining
        return WaitingPrompts(running[0] if running else self.waiting[0].remaining, depth, total)

    def _admit(self, counts: dict[RowKey, int], budget: int) -> int:
        """Run waiting sequences, from the head, while `max_num_seqs`, `budget` and pages last.

        Returns the rest of the budget.
        """
        while budget and len(self.waiting) and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self.page_manager.admit(sequence):
                break
            self.waiting.remove(sequence)
            sequence.tokens_when_admitted = len(sequence.tokens)
            self.running.put(sequence)
            counts[sequence.key] = min(sequence.remaining, budget)
            budget -= counts[sequence.key]
        return budget
