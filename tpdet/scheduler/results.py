"""What a step's results mean for a sequence: its tokens, its prompt scores, its end."""

from collections import abc
from typing import NamedTuple

import msgspec

from tpdet.control.row_messages import RowKey, SampledToken
from tpdet.errors import IntegrityError, RequestError
from tpdet.requests.request import (
    ABORTED,
    PooledOutput,
    PromptOutput,
    RequestFailed,
    TokenOutput,
)
from tpdet.scheduler.pending_steps import PendingStep
from tpdet.scheduler.sequence import PENDING, Sequence

Output = TokenOutput | PromptOutput | RequestFailed | PooledOutput
Scores = abc.Mapping[RowKey, tuple[SampledToken, ...]]
Runs = abc.Mapping[RowKey, abc.Sequence[SampledToken]]
"""The tokens of rows with drafts, in order, up to the first position that has none."""


class StepOrigin(NamedTuple):
    """What computed a step: whether stock arithmetic, and the number of the weights."""

    approximate: bool = False
    weights: int = 0


STRICT_START = StepOrigin()


def check_results(
    step: PendingStep, sampled: abc.Mapping[RowKey, SampledToken], scores: Scores, runs: Runs
) -> None:
    """Refuse (IntegrityError) results that do not answer the rows of a pending step.

    runs: the tokens of rows with drafts, up to the first position that has none. Results of a
    sequence that finished meanwhile may be given or not; they are not read.
    """
    keys = [sequence.key for sequence in step.sequences]
    whole = len(sampled) == len(keys) and all(step.samples) and all(key in sampled for key in keys)
    if scores or runs or not whole:
        _check_tokens(step, sampled, scores, runs)
    if step.scoring or scores:
        _check_scores(step, scores)


def _check_tokens(
    step: PendingStep, sampled: abc.Mapping[RowKey, SampledToken], scores: Scores, runs: Runs
) -> None:
    for key in (sampled.keys() | scores.keys() | runs.keys()) - {
        sequence.key for sequence in step.sequences
    }:
        raise IntegrityError(f"a result for {key}, which is not in the pending step")
    for sequence, end, samples in zip(step.sequences, step.ends, step.samples, strict=True):
        if sequence.finished or sequence.key in step.void:
            continue
        one, run = samples == 1, runs.get(sequence.key)
        if one != (sequence.key in sampled) or len(run or ()) > samples * (samples > 1):
            due = {0: "no token", 1: "a token"}.get(samples, f"at most {samples} tokens")
            raise IntegrityError(f"{sequence.key} at position {end} wants {due}")


def _check_scores(step: PendingStep, scores: Scores) -> None:
    rows = zip(step.sequences, step.plan.rows.start.tolist(), step.ends, strict=True)
    for sequence, start, end in rows:
        if sequence.finished:
            continue
        scoring = step.scoring.get(sequence.key)
        targets = () if scoring is None else scoring.target_ids
        scored = tuple(score.token_id for score in scores.get(sequence.key, ()))
        if scored != targets:
            raise IntegrityError(
                f"{sequence.key} wants {len(targets)} prompt scores for positions {start} to "
                f"{end - 1}; got {len(scored)}, or of other tokens"
            )


def take_results(
    sequence: Sequence,
    end: int,
    token: SampledToken | None,
    scores: Scores,
    origin: StepOrigin = STRICT_START,
) -> list[Output]:
    """Change `sequence` by the results of its row before position `end`; the reader's outputs.

    token: what the row samples, if it does. origin: what computed the step.

    The last output is a RequestFailed when the token would end the sequence before `min_tokens`
    (which the sampler must not choose), and when the schema reaches a limit.
    """
    if scores:
        sequence.prompt_scores.extend(scores.get(sequence.key, ()))
    if token is None and (sequence.generates or end < len(sequence.tokens)):
        return []
    outputs: list[Output] = []
    # Nothing generated before means that the prompt was completed just now, for the first time.
    if sequence.scores_prompt and end == sequence.prompt_length:
        outputs.append(_prompt_output(sequence, origin.weights))
    if token is not None:
        outputs.append(_take_token(sequence, end, token, origin))
    else:
        outputs.append(_end_of_prompt(sequence, origin))
    return outputs


def mark_old_keys(outputs: list[Output], sequences: abc.Iterable[Sequence]) -> list[Output]:
    """The outputs, with the mark of `TokenOutput.weights` where a sequence has old keys."""
    marked = {(s.request_id, s.choice) for s in sequences if s.has_old_keys}
    return [
        msgspec.structs.replace(output, weights=-1 - output.weights)
        if isinstance(output, TokenOutput) and (output.request_id, output.choice) in marked
        else output
        for output in outputs
    ]


def forget_prompt_scores(sequence: Sequence) -> None:
    """Have a prompt scored anew, unless its reader has the scores: weights must not be mixed."""
    if len(sequence.tokens) == sequence.prompt_length:
        sequence.prompt_scores.clear()


def _prompt_output(sequence: Sequence, weights: int) -> PromptOutput:
    """The log-probabilities of the prompt; the first token, and those not asked for, have none."""
    scores, before = sequence.prompt_scores, 1 + sequence.first_scored
    return PromptOutput(
        sequence.request_id,
        ((None,) * before + tuple(score.logprob for score in scores)),
        (((),) * before + tuple(score.top for score in scores)),
        ((0,) * before + tuple(score.rank for score in scores)),
        weights,
    )


def ended_early(sequence: Sequence) -> TokenOutput:
    """The last output of a choice that somebody ended; it adds no token."""
    return TokenOutput(sequence.request_id, sequence.choice, -1, 0.0, finish_reason=ABORTED)


def _end_of_prompt(sequence: Sequence, origin: StepOrigin) -> TokenOutput:
    """The only output of a choice that generates no token."""
    return TokenOutput(
        sequence.request_id,
        sequence.choice,
        -1,
        0.0,
        finish_reason="length",
        cached_tokens=sequence.prefix.cached_tokens or 0,
        approximate=origin.approximate,
        weights=origin.weights,
    )


def plain_output(
    sequence: Sequence, end: int, token: SampledToken, origin: StepOrigin
) -> TokenOutput | None:
    """Put `token` at position `end` where nothing else follows from it; None where more may."""
    token_id = token.token_id
    if sequence.looks or token_id in sequence.ends or end + 1 >= sequence.full_length:
        return None
    if end == sequence.prompt_length:  # the first output says how many tokens were cached
        return None
    sequence.tokens[end] = token_id
    return TokenOutput(
        sequence.request_id,
        sequence.choice,
        token_id,
        token.logprob,
        token.top,
        None,
        None,
        0,
        False,
        origin.approximate,
        token.rank,
        0,
        0,
        b"",
        origin.weights,
    )


def take_run(
    sequence: Sequence, end: int, run: abc.Sequence[SampledToken], origin: StepOrigin
) -> tuple[list[Output], bool]:
    """Commit the tokens of a row with drafts, which ends before position `end`: the outputs.

    run: what was sampled at its positions, up to the first that has no token. A token is committed
    if every draft before it is the token that was sampled there; all else is forgotten, and the
    next row computes those positions again. True if one of them has no token: it may owe that to
    the drafts behind it (masked values that are not finite), so it must be computed without any.
    """
    drafts = sequence.take_drafts()
    begin = end - len(drafts)
    outputs: list[Output] = []
    lacks_token = False
    for index, token in enumerate(run):
        sequence.tokens.append(PENDING)
        position = begin + index
        plain = plain_output(sequence, position, token, origin)
        output = plain or _take_token(sequence, position, token, origin)
        outputs.append(output)
        if isinstance(output, RequestFailed) or output.finish_reason is not None:
            break
        if index == len(drafts) or not follows_draft(token, drafts[index]):
            break
    else:
        lacks_token = True
    sequence.computed = len(sequence.tokens) - 1
    if outputs and isinstance(outputs[0], TokenOutput) and sequence.drafts_are_requested:
        counts = {"draft_tokens": len(drafts), "accepted_draft_tokens": len(outputs) - 1}
        outputs[0] = msgspec.structs.replace(outputs[0], **counts)
    return outputs, lacks_token


def follows_draft(token: SampledToken, draft: int) -> bool:
    """Whether what was sampled is the draft, so that the position behind it counts."""
    return token.token_id == draft


def _take_token(
    sequence: Sequence, end: int, token: SampledToken, origin: StepOrigin
) -> TokenOutput | RequestFailed:
    """Put `token` at position `end`, and decide whether it ends the sequence."""
    request_id, token_id = sequence.request_id, token.token_id
    if end < sequence.free_from and token_id in sequence.ends:
        why = (
            f"token {token_id} was sampled after {end - sequence.prompt_length} tokens "
            f"although min_tokens is {sequence.request.params.min_tokens}"
        )
        return RequestFailed(request_id, IntegrityError.code, why)
    sequence.tokens[end] = token_id
    reason = sequence.finish_reason(end)
    stop = token_id if reason == "stop" else None
    dead_end = False
    if reason is None and sequence.constraint is not None:
        try:
            following = sequence.next_ids(end + 1)
        except RequestError as error:
            return RequestFailed(request_id, RequestError.code, str(error))
        if following is not None and following.dead:
            reason, dead_end = ("stop", False) if following.complete else ("length", True)
    return TokenOutput(
        request_id,
        sequence.choice,
        token_id,
        token.logprob,
        token.top,
        reason,
        stop,
        (sequence.prefix.cached_tokens or 0) if end == sequence.prompt_length else 0,
        dead_end,
        origin.approximate,
        token.rank,
        weights=origin.weights,
    )
