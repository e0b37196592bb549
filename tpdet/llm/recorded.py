"""Records answers of a model in this process, and holds recorded ones against new ones."""

from tpdet.audit.recorded import (
    ChangedPart,
    Difference,
    RecordedAnswer,
    RecordedChoice,
    digest_of,
    first_difference,
)
from tpdet.audit.replay import VERSIONS
from tpdet.errors import RequestError, UsageError
from tpdet.llm.results import RequestOutput
from tpdet.requests.request import SamplingParams

CHECKED_AT_ONCE = 48
"""Choices that are verified at a time: of two steps, one of which runs while the host works."""


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
        replay_digest=output.replay_digest,
        replay_version=output.replay_version or VERSIONS[0],
        logprobs_mode=output.logprobs_mode,
    )


def difference_of(
    answer: RecordedAnswer, output: RequestOutput, eos_token_ids: tuple[int, ...]
) -> Difference | ChangedPart | None:
    """The first difference of an answer: of an id or its bits, or else of a digest that it has."""
    found = first_difference(answer.outputs, choices_of(output))
    if found is not None or answer.replay_digest is None:
        return found
    part = ChangedPart("replay_digest", answer.replay_digest, digest_of(answer, eos_token_ids))
    return None if part.equal else part


def refuse_unverified(fixed_batch: int | None, approximate: bool) -> None:
    """Refuse (UsageError) to check answers where drafts cannot be verified."""
    if approximate:
        raise UsageError("answers cannot be checked in the approximate mode: leave it out")
    if fixed_batch:
        raise UsageError(
            f"answers are verified as drafts, which fixed_batch {fixed_batch} (--fixed-batch) "
            "rules out: leave it out"
        )


def choices_of(output: RequestOutput) -> tuple[RecordedChoice, ...]:
    """An answer's choices in the form of recorded ones."""
    return tuple(RecordedChoice(o.token_ids, o.logprob_bits) for o in output.outputs)
