"""Recorded answers, and the first difference between one and what is computed now."""

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from tpdet.errors import DisagreementError, RequestError, UsageError
from tpdet.llm.results import RequestOutput
from tpdet.request import SamplingParams

CHECKED_AT_ONCE = 24
"""Choices that are verified at a time: so many rows of a step may carry long drafts, and rows
without drafts would take their room."""


class RecordedChoice(msgspec.Struct, frozen=True):
    """A choice's token ids, and the bits of their log-probabilities as 8 hex digits each."""

    token_ids: tuple[int, ...]
    logprob_bits: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprob_bits):
            raise ValueError(
                f"{len(self.token_ids)} token_ids and {len(self.logprob_bits)} logprob_bits"
            )


class RecordedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, how it was sampled, and its answer; `outputs` has a choice for each of `n`.

    contract, weights: contract id and model digest, 64 hex digits each. Its JSON is part of a line
    of `tpdet generate --json`.
    """

    contract: str
    weights: str
    seed: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    outputs: tuple[RecordedChoice, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.outputs)


class Scored(msgspec.Struct, frozen=True):
    """A token id and the bits of its log-probability."""

    id: int
    bits: str


class Difference(msgspec.Struct, frozen=True):
    """The first place of an answer where recorded and computed differ.

    position: in the choice's output, from 0. None stands for an answer that has ended before it.
    """

    choice: int
    position: int
    recorded: Scored | None
    computed: Scored | None

    def __str__(self) -> str:
        place = f"choice {self.choice}, position {self.position}"
        return f"{place}: recorded {_shown(self.recorded)}, computed {_shown(self.computed)}"


def recorded_answer(
    output: RequestOutput, params: SamplingParams, contract: str, weights: str
) -> RecordedAnswer:
    """What is kept of an answer; `params` have its `max_tokens`. Raises RequestError for no answer.

    An answer that was aborted, or is approximate, can never be checked.
    """
    if output.replay_digest is None:
        raise RequestError(
            f"the answer to prompt {output.request_id} is approximate, or was cut off: it cannot "
            "be recorded"
        )
    return RecordedAnswer(
        contract=contract,
        weights=weights,
        seed=output.seed,
        prompt_token_ids=tuple(output.prompt_token_ids),
        params=params,
        outputs=choices_of(output),
    )


def first_difference(
    recorded: Sequence[RecordedChoice], computed: Sequence[RecordedChoice]
) -> Difference | None:
    """The first difference by choice, then position; None where all ids and bits are equal."""
    for choice, (theirs, ours) in enumerate(zip(recorded, computed, strict=True)):
        if theirs == ours:
            continue
        pairs = zip_longest(_scored(theirs), _scored(ours))
        for position, (one, other) in enumerate(pairs):
            if one != other:
                return Difference(choice, position, one, other)
    return None


def check_recorded(
    answer: RecordedAnswer, place: str, contract: str, weights: str, vocab_size: int
) -> None:
    """Refuse an answer of another contract or other weights (DisagreementError), or of no form."""
    for name, theirs, ours in (
        ("contract", answer.contract, contract),
        ("model digest", answer.weights, weights),
    ):
        if theirs != ours:
            raise DisagreementError(
                f"{place} was computed with {name} {theirs}, and this model has {ours}: check it "
                "with the model and the settings that made it"
            )
    if len(answer.outputs) != answer.params.n:
        raise RequestError(
            f"{place} has {len(answer.outputs)} choices, and its parameters n {answer.params.n}"
        )
    for choice in answer.outputs:
        for token in choice.token_ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{place} has token id {token}, outside the vocabulary [0, {vocab_size})"
                )


def refuse_unverified(fixed_batch: int | None, approximate: bool) -> None:
    """Refuse (UsageError) to check answers where drafts cannot be verified."""
    if approximate:
        raise UsageError("answers cannot be checked in the approximate mode: leave it out")
    if fixed_batch:
        raise UsageError(
            f"answers are verified as drafts, which fixed_batch {fixed_batch} (--fixed-batch) "
            "rules out: leave it out"
        )


def checked_params(answer: RecordedAnswer) -> SamplingParams:
    """How a recorded answer is computed again: with its seed, and no more text than it needs."""
    return msgspec.structs.replace(
        answer.params,
        seed=answer.seed,
        logprobs=None,
        prompt_logprobs=None,
        detokenize=bool(answer.params.stop),
    )


def choices_of(output: RequestOutput) -> tuple[RecordedChoice, ...]:
    """An answer's choices in the form of recorded ones."""
    return tuple(RecordedChoice(o.token_ids, o.logprob_bits) for o in output.outputs)


def _scored(choice: RecordedChoice) -> list[Scored]:
    return [Scored(*pair) for pair in zip(choice.token_ids, choice.logprob_bits, strict=True)]


def _shown(token: Scored | None) -> str:
    return "the end" if token is None else f"token {token.id} (bits {token.bits})"
