"""Which side is at fault where an answer differs: it is computed again in other layouts.

No layout may change a bit. So replays that differ among themselves accuse this machine, and
replays that all agree accuse the receipt: it, the machine that gave it, or its weights in memory.
"""

import argparse
import copy
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from tpdet.audit.recorded import RecordedAnswer, RecordedChoice, checked_params, first_difference
from tpdet.audit.replayed import FaultySide
from tpdet.errors import TpdetError
from tpdet.llm.llm import LLM
from tpdet.llm.prompts import TokensPrompt
from tpdet.llm.results import RequestOutput
from tpdet.tools.check.by_model import open_model
from tpdet.tools.replay.computed import asked_answers, computed_choices
from tpdet.tools.replay.receipts import Receipt

MOST_EXAMINED = 4
"""Receipts that are computed in other layouts: one would do, and tokens are made one by one."""
_BESIDE = 4


class _Replay(NamedTuple):
    layout: str
    choices: list[RecordedChoice]


class Examination:
    """Receipts that differ, and their answers in one layout after the other."""

    def __init__(self) -> None:
        self._receipts: dict[str, Receipt] = {}
        self._replays: dict[str, list[_Replay]] = {}
        self.untried: str | None = None
        """Why there is none by another number of ranks."""

    def add(self, receipt: Receipt, outputs: Sequence[RequestOutput], llm: LLM) -> None:
        """Examine a receipt, by the model that found it: generated alone, and beside itself.

        outputs: what differed. More than MOST_EXAMINED receipts are not examined.
        """
        if len(self._receipts) >= MOST_EXAMINED:
            return
        asked = asked_answers(receipt, llm.engine.model_config.vocab_size)
        beside = _generated(llm, [one for one in asked for _ in range(_BESIDE)])
        several = f"generated {_BESIDE} times in one batch"
        layouts = [("verified as drafts", outputs), ("generated alone", _generated(llm, asked))]
        layouts += [(several, beside[row::_BESIDE]) for row in range(_BESIDE)]
        self._receipts[receipt.predicate.id] = receipt
        self._replays[receipt.predicate.id] = [
            _Replay(f"{_size(llm)} {name}", computed_choices(receipt, made))
            for name, made in layouts
        ]

    def add_other_size(self, options: argparse.Namespace, llm: LLM) -> None:
        """Generate all by another number of ranks, where that can be had; closes `llm`."""
        if not self._receipts:
            return
        size, mode = llm.engine.world.size, llm.config.logprobs_mode
        llm.close()
        other = copy.copy(options)
        other.tp = size // 2 if size > 1 else 2
        try:
            with open_model(other, mode) as resized:
                for name, receipt in self._receipts.items():
                    asked = asked_answers(receipt, resized.engine.model_config.vocab_size)
                    choices = computed_choices(receipt, _generated(resized, asked))
                    self._replays[name].append(_Replay(f"{_size(resized)} generated", choices))
        except TpdetError as error:
            self.untried = f"TP {other.tp} was not tried: {error}"

    def faults(self) -> dict[str, FaultySide]:
        """The side at fault, by each examined receipt's id."""
        return {name: _fault(replays) for name, replays in self._replays.items()}


def _fault(replays: Sequence[_Replay]) -> FaultySide:
    layouts = tuple(dict.fromkeys(replay.layout for replay in replays))
    first = replays[0]
    for other in replays[1:]:
        difference = first_difference(first.choices, other.choices)
        if difference is not None:
            between = first.layout, other.layout
            return FaultySide("this machine", layouts, between, difference)
    return FaultySide("receipt", layouts)


def _generated(llm: LLM, asked: Sequence[RecordedAnswer]) -> list[RequestOutput]:
    """Answers computed together, without the recorded ones as drafts and without cached pages."""
    prompts = [
        TokensPrompt(prompt_token_ids=one.prompt_token_ids, cache_salt=secrets.token_hex(16))
        for one in asked
    ]
    return llm.generate(prompts, [checked_params(one) for one in asked], use_tqdm=False)


def _size(llm: LLM) -> str:
    return f"TP {llm.engine.world.size}"
