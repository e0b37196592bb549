"""Receipts against what a model here computes: what differs of each, by verified drafts."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tpdet.audit.receipts.statement import summed
from tpdet.audit.recorded import (
    ChangedPart,
    Difference,
    RecordedAnswer,
    RecordedChoice,
    first_difference,
)
from tpdet.llm.llm import LLM
from tpdet.llm.recorded import choices_of
from tpdet.llm.results import RequestOutput
from tpdet.tools.replay.receipts import Receipt


def why_not(receipt: Receipt, llm: LLM) -> str | None:
    """Why a model does not compute a receipt's answer; None if it does."""
    predicate, runner = receipt.predicate, llm.engine.runner
    if predicate.approximate:
        return "its answer is approximate, of which no bit is promised"
    if predicate.spans:
        names = sorted({span.weights for span in predicate.spans})
        return f"several weights computed its answer: {', '.join(names)}"
    mode = receipt.content.answers[0].logprobs_mode
    contract, weights = runner.contracts.strict, runner.model_digest
    same_contract = "give the flags that its server had, or its version of tpdet"
    for name, theirs, ours, remedy in (
        ("contract", predicate.contract, contract, same_contract),
        ("model digest", predicate.weights, weights, "give --model its weights"),
        ("logprobs_mode", mode, llm.config.logprobs_mode, "give it as --logprobs-mode"),
    ):
        if theirs != ours:
            return f"it has {name} {theirs}, and this model {ours}: {remedy}"
    return None


def asked_answers(receipt: Receipt, vocab_size: int) -> list[RecordedAnswer]:
    """The answers of a receipt as they are computed again, each prompt's own.

    Of one that did not come to its end, no more tokens are computed than were sent. Ids outside
    the vocabulary are no drafts.
    """
    asked = []
    for answer in receipt.content.answers:
        params = answer.params
        if not receipt.whole:
            most = max([1, *(len(choice.token_ids) for choice in answer.outputs)])
            least = min(params.min_tokens, most)
            params = msgspec.structs.replace(params, max_tokens=most, min_tokens=least)
        outputs = tuple(_possible(choice, vocab_size) for choice in answer.outputs)
        asked.append(msgspec.structs.replace(answer, params=params, outputs=outputs))
    return asked


def differences_of(
    receipt: Receipt, outputs: Sequence[RequestOutput], eos_token_ids: tuple[int, ...]
) -> list[Difference | ChangedPart]:
    """What differs of a receipt: the first token or bit, or else the numbers that were signed.

    Choices are counted over all prompts.
    """
    token = first_difference(recorded_choices(receipt), computed_choices(receipt, outputs))
    if token is not None:
        return [token]
    predicate, choices = receipt.predicate, [one for output in outputs for one in output.outputs]
    prompts = [len(answer.prompt_token_ids) for answer in receipt.content.answers]
    counts = [len(choice.token_ids) for choice in recorded_choices(receipt)]
    parts: list[tuple[str, Any, Any]] = [
        ("prompt_tokens", predicate.prompt_tokens, summed(prompts)),
        ("tokens", predicate.tokens, summed(counts)),
        ("logprobs_mode", predicate.logprobs_mode, outputs[0].logprobs_mode),
    ]
    if receipt.whole:
        reasons = tuple(choice.finish_reason for choice in choices)
        if predicate.finish_reasons:  # of many choices none are signed
            parts.append(("finish_reasons", predicate.finish_reasons, reasons))
        ends = tuple(sorted(receipt.content.eos_token_ids)), tuple(sorted(eos_token_ids))
        parts.append(("eos_token_ids", *ends))
    changed = [ChangedPart(*part) for part in parts]
    return [part for part in changed if not part.equal]


def recorded_choices(receipt: Receipt) -> list[RecordedChoice]:
    """The choices of all prompts as they were recorded."""
    return [choice for answer in receipt.content.answers for choice in answer.outputs]


def computed_choices(receipt: Receipt, outputs: Sequence[RequestOutput]) -> list[RecordedChoice]:
    """The choices of all prompts as they were computed, as far as the receipt goes."""
    choices = [choice for output in outputs for choice in choices_of(output)]
    if receipt.whole:
        return choices
    lengths = [len(choice.token_ids) for choice in recorded_choices(receipt)]
    return [_first(*pair) for pair in zip(choices, lengths, strict=True)]


def _possible(choice: RecordedChoice, vocab_size: int) -> RecordedChoice:
    """A choice up to the first id that no model of this vocabulary samples."""
    ids = enumerate(choice.token_ids)
    end = next((index for index, token in ids if not 0 <= token < vocab_size), None)
    return choice if end is None else _first(choice, end)


def _first(choice: RecordedChoice, count: int) -> RecordedChoice:
    return RecordedChoice(choice.token_ids[:count], choice.logprob_bits[:count])
