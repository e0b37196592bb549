"""Replays receipts by one model, and counts what was found."""

import time
from collections.abc import Sequence

from tpdet.audit.replayed import NotReplayed, ReceiptDiffers, ReplaySummary
from tpdet.grammar import trial
from tpdet.llm.llm import LLM
from tpdet.text.tokenizer import ending_ids
from tpdet.tools.replay.computed import asked_answers, differences_of, why_not
from tpdet.tools.replay.fault import Examination
from tpdet.tools.replay.receipts import Receipt


class ReceiptReplay:
    """The receipts that were replayed so far. `findings`: those that are not equal, in order."""

    def __init__(self, llm: LLM, examination: Examination) -> None:
        """examination: gets what differs."""
        self._llm, self._examination = llm, examination
        model, runner = llm.engine.model_config, llm.engine.runner
        self._vocab_size = model.vocab_size
        self._eos_token_ids = ending_ids(model.eos_token_ids, llm.tokenizer)
        self._names = runner.contracts.strict, runner.model_digest, llm.system_fingerprint
        self._tp = llm.engine.world.size
        self.findings: list[NotReplayed | ReceiptDiffers] = []
        self._receipts = self._tokens = 0
        self._seconds = 0.0

    def add(self, receipts: Sequence[Receipt]) -> None:
        """Compute some receipts' answers together. Raises as `LLM.computed`.

        Seconds are counted from when their schemas were tried, as of `tpdet check`.
        """
        replayed = []
        for receipt in receipts:
            self._receipts += 1
            why = why_not(receipt, self._llm)
            if why is None:
                replayed.append((receipt, asked_answers(receipt, self._vocab_size)))
            else:
                self.findings.append(NotReplayed(receipt.predicate.id, receipt.leaf, why))
        for form in (one.params.form for _, asked in replayed for one in asked):
            if form is not None:
                trial.check(form)  # a process and a library of their own, before the clock runs
                self._llm.engine.grammars.constrain(form)
        begin = time.monotonic()
        outputs = iter(self._llm.computed([one for _, asked in replayed for one in asked]))
        self._seconds += time.monotonic() - begin
        for receipt, asked in replayed:
            self._tokens += receipt.tokens
            computed = [next(outputs) for _ in asked]
            differences = differences_of(receipt, computed, self._eos_token_ids)
            if differences:
                differs = ReceiptDiffers(receipt.predicate.id, receipt.leaf, tuple(differences))
                self.findings.append(differs)
                self._examination.add(receipt, computed, self._llm)

    def summary(self, erased: int) -> ReplaySummary:
        """The totals. erased: receipts whose content was."""
        different = sum(isinstance(one, ReceiptDiffers) for one in self.findings)
        contract, weights, fingerprint = self._names
        return ReplaySummary(
            contract=contract,
            weights=weights,
            system_fingerprint=fingerprint,
            tp=self._tp,
            receipts=self._receipts,
            different=different,
            incomparable=len(self.findings) - different,
            erased=erased,
            tokens=self._tokens,
            seconds=self._seconds,
        )
