"""What a step's results mean for a sequence: tokens appended, scores kept, the end decided."""

from collections.abc import Mapping

from tpdet.control.plan import Row
from tpdet.control.sampling_row import RowKey, SampledToken
from tpdet.errors import IntegrityError, RequestError
from tpdet.request import PromptOutput, RequestFailed, TokenOutput
from tpdet.scheduler.flight import Flight
from tpdet.scheduler.sequence import Sequence

Output = TokenOutput | PromptOutput | RequestFailed
Scores = Mapping[RowKey, tuple[SampledToken, ...]]


def check_results(flight: Flight, sampled: Mapping[RowKey, SampledToken], scores: Scores) -> None:
    """Refuse (IntegrityError) results that do not answer the rows of the step in flight.

    Results of a sequence that finished in flight may be there or not; they are not read.
    """
    for key in (sampled.keys() | scores.keys()) - flight.keys:
        raise IntegrityError(f"a result for {key}, which is not in the step in flight")
    for row, sequence in flight.rows:
        if row.draws != (sequence.key in sampled) and not sequence.finished:
            end = row.start + len(row.token_ids)
            wanted = "wants a token" if row.draws else "wants no token"
            raise IntegrityError(f"{sequence.key} at position {end} {wanted}")
    if flight.scoring or scores:
        _check_scores(flight, scores)


def _check_scores(flight: Flight, scores: Scores) -> None:
    for row, sequence in flight.rows:
        if sequence.finished:
            continue
        end = row.start + len(row.token_ids)
        scoring = flight.scoring.get(sequence.key)
        targets = () if scoring is None else scoring.target_ids
        found = tuple(score.token_id for score in scores.get(sequence.key, ()))
        if found != targets:
            raise IntegrityError(
                f"{sequence.key} wants {len(targets)} prompt scores for positions {row.start} to "
                f"{end - 1}; got {len(found)}, or of other tokens"
            )


def take_results(
    sequence: Sequence,
    row: Row,
    sampled: Mapping[RowKey, SampledToken],
    scores: Scores,
    approximate: bool = False,
) -> list[Output]:
    """Change `sequence` by its row's results; what its reader should hear.

    approximate: how the step was computed.

    The last output is a RequestFailed when the token would end the sequence before `min_tokens`
    (the sampler was told not to draw it), and when its schema reaches a limit.
    """
    end = row.start + len(row.token_ids)
    if scores:
        sequence.prompt_scores.extend(scores.get(sequence.key, ()))
    request, choice = sequence.request, sequence.choice
    if not row.draws and (request.max_tokens or end < len(sequence.tokens)):
        return []
    told: list[Output] = []
    # Nothing generated before means that the prompt was completed just now, for the first time.
    if sequence.scores_prompt and end == sequence.prompt_length:
        told.append(sequence.prompt_output())
    if not row.draws:
        cached = sequence.cached_tokens or 0
        ended = TokenOutput(
            request.request_id, choice, -1, 0.0, (), "length", None, cached, approximate=approximate
        )
        return [*told, ended]
    token = sampled[sequence.key]
    if token.token_id in sequence.forbidden_ids(end):
        why = (
            f"token {token.token_id} was drawn after {end - sequence.prompt_length} tokens "
            f"although min_tokens is {request.params.min_tokens}"
        )
        return [*told, RequestFailed(request.request_id, IntegrityError.code, why)]
    sequence.tokens[end] = token.token_id
    reason = sequence.finish_reason(end)
    stop = token.token_id if reason == "stop" else None
    dead_end = False
    if reason is None and sequence.constraint is not None:
        try:
            following = sequence.next_ids(end + 1)
        except RequestError as error:
            return [*told, RequestFailed(request.request_id, RequestError.code, str(error))]
        if following is not None and following.dead:
            reason, dead_end = ("stop", False) if following.complete else ("length", True)
    cached = (sequence.cached_tokens or 0) if end == sequence.prompt_length else 0
    told.append(
        TokenOutput(
            request.request_id,
            choice,
            token.token_id,
            token.logprob,
            token.top,
            reason,
            stop,
            cached,
            dead_end,
            approximate,
            token.rank,
        )
    )
    return told
