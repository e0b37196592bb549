"""What a step's results mean for a sequence: tokens appended, scores kept, the end decided."""

from collections.abc import Iterator, Mapping

from tpdet.errors import IntegrityError
from tpdet.plan import Row
from tpdet.request import PromptOutput, RequestFailed, TokenOutput
from tpdet.sampling_row import RowKey, SampledToken
from tpdet.scheduler.sequence import Sequence

Output = TokenOutput | PromptOutput | RequestFailed
Scores = Mapping[RowKey, tuple[SampledToken, ...]]


def check_results(
    flying: list[tuple[Row, Sequence]], sampled: Mapping[RowKey, SampledToken], scores: Scores
) -> None:
    """Refuse (IntegrityError) results that do not answer the rows of the step in flight.

    Results of a sequence that finished in flight may be there or not; they are not read.
    """
    keys = {sequence.key: sequence for _, sequence in flying}
    for key in (*sampled, *scores):
        if key not in keys:
            raise IntegrityError(f"a result for {key}, which is not in the step in flight")
    for row, sequence in flying:
        if sequence.finished:
            continue
        end = row.start + len(row.token_ids)
        if sequence.samples_at(end) != (sequence.key in sampled):
            wanted = "wants a token" if sequence.samples_at(end) else "wants no token"
            raise IntegrityError(f"{sequence.key} at position {end} {wanted}")
        wanted_scores = sequence.scoring_row(row.start, end)
        targets = () if wanted_scores is None else wanted_scores.target_ids
        found = tuple(score.token_id for score in scores.get(sequence.key, ()))
        if found != targets:
            raise IntegrityError(
                f"{sequence.key} wants {len(targets)} prompt scores for positions {row.start} to "
                f"{end - 1}; got {len(found)}, or of other tokens"
            )


def take_results(
    sequence: Sequence, row: Row, sampled: Mapping[RowKey, SampledToken], scores: Scores
) -> Iterator[Output]:
    """Change `sequence` by its row's results and yield what its reader should hear.

    The last output is a RequestFailed, changing nothing, when the token would end the sequence
    before `min_tokens`: the sampler was told not to draw it.
    """
    end = row.start + len(row.token_ids)
    sequence.computed = end
    sequence.prompt_scores.extend(scores.get(sequence.key, ()))
    if end < len(sequence.tokens):
        return
    request, choice = sequence.request, sequence.choice
    # Nothing generated yet means that the prompt was completed just now, and for the first time.
    if sequence.scores_prompt and not sequence.generated:
        yield sequence.prompt_output()
    if not request.params.max_tokens:
        yield TokenOutput(request.request_id, choice, -1, 0.0, (), "length")
        return
    token = sampled[sequence.key]
    if token.token_id in sequence.forbidden_ids():
        yield RequestFailed(
            request.request_id,
            IntegrityError.code,
            f"token {token.token_id} was drawn after {sequence.generated} tokens although "
            f"min_tokens is {request.params.min_tokens}",
        )
        return
    # One step ahead, this is where the placeholder that stands for the token would be filled.
    sequence.tokens.append(token.token_id)
    reason = sequence.finish_reason()
    stop = token.token_id if reason == "stop" else None
    yield TokenOutput(
        request.request_id, choice, token.token_id, token.logprob, token.top, reason, stop
    )
