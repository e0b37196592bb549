"""The rows of a plan, made from sequences: what is computed, sampled and scored."""

from collections import abc
from operator import attrgetter

import numpy as np

from tpdet.control.plan import PlanRows
from tpdet.control.row_messages import ScoringRow
from tpdet.kernels.inputs.row_params import OF_REQUEST, RowParams, TokenIds
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.scheduler.sequence import PAGE_BYTES, PENDING, VERSION_BYTES, Sequence, next_scored

_OTHER_NAMES = {"bias": "logit_bias"}  # of a row's fields among a request's parameters
_of_request = attrgetter("temperature", *(_OTHER_NAMES.get(name, name) for name in OF_REQUEST))


def plan_rows(
    sequences: abc.Sequence[Sequence], counts: abc.Sequence[int], snapshots: bytes = b""
) -> PlanRows:
    """The rows that compute the next `counts[i]` tokens of `sequences[i]`, i ascending.

    A pending token is named by its place among those that the step before samples
    (`Sequence.sample_index`): -1 for the first one, -2 for the second. snapshots: those that the
    rows leave behind (`PlanRows.snapshots`).
    """
    numbers = np.empty((9, len(sequences)), np.int64)
    identities = b"".join([sequence.identity for sequence in sequences])
    numbers[:3] = np.frombuffer(identities, np.int64).reshape(-1, 3).T
    start, count, held, logits, samples, unverified = numbers[3:]
    start[:] = [s.computed for s in sequences]
    count[:] = counts
    held[:] = -(-(start + count) // PAGE_TOKENS)
    unverified[:] = 0
    samples[:] = start + count == [len(s.tokens) if s.generates else -1 for s in sequences]
    logits[:] = samples
    for index, sequence in enumerate(sequences):
        if not sequence.reads_results:
            continue
        if sequence.drafted:
            logits[index] = samples[index] = counts[index]
            if sequence.expected:
                unverified[index] = sequence.drafted
        elif sequence.scores_prompt:
            end = sequence.computed + counts[index]
            logits[index] = end - _first_logits(sequence, sequence.computed, end)
        elif sequence.request.pooling is not None:
            ends = sequence.computed + counts[index] == sequence.prompt_length
            logits[index] = counts[index] if sequence.pools_all else ends
    start -= unverified
    pages = held.tolist()
    return PlanRows(
        numbers.tobytes(),
        np.array(_token_ids(sequences, counts), np.int64).tobytes(),
        b"".join([s.page_bytes[: PAGE_BYTES * n] for s, n in zip(sequences, pages, strict=True)]),
        b"".join(
            [s.version_bytes[: VERSION_BYTES * n] for s, n in zip(sequences, pages, strict=True)]
        ),
        _states(sequences),
        np.array([id_ for s in sequences for id_ in s.expected], np.int64).tobytes(),
        snapshots,
    )


def _states(sequences: abc.Sequence[Sequence]) -> bytes:
    """The columns of `PlanRows.states`; empty where sequences have no states."""
    uses = [sequence.states for sequence in sequences if sequence.states is not None]
    both = [use.slot for use in uses] + [use.standing for use in uses]
    return np.array(both, np.int64).tobytes()


def _token_ids(sequences: abc.Sequence[Sequence], counts: abc.Sequence[int]) -> list[int]:
    ids: list[int] = []
    for sequence, count in zip(sequences, counts, strict=True):
        tokens, begin = sequence.tokens, sequence.computed
        if sequence.drafted and (sequence.expected or tokens[begin] == PENDING):
            drafts = sequence.expected or tokens[begin:]
            ids += [-1 - sequence.sample_index, *drafts[1:count]]
            continue
        if count > 1:
            ids += tokens[begin : begin + count - 1]
        last = tokens[begin + count - 1]
        ids.append(last if last != PENDING else -1 - sequence.sample_index)
    return ids


def row_params(sequence: Sequence, end: int, known: np.ndarray | None = None) -> RowParams:
    """What the sampler needs of a row that ends before position `end` and samples a token.

    known: the sequence's token ids, int64, where many rows of it are asked for.

    Ids of prompt and output are given where a penalty reads them. The prompt is the original one,
    also after a preemption. Forbidden ids would end the sequence before `min_tokens`.
    """
    params = sequence.request.params
    temperature, *numbers = _of_request(params)
    prompt: TokenIds = []
    output: TokenIds = []
    if sequence.penalises:
        tokens = sequence.tokens if known is None else known
        output = tokens[sequence.prompt_length : end]
        if params.repetition_penalty != 1.0:
            prompt = tokens[: sequence.prompt_length]
    allowed = None if sequence.constraint is None else sequence.allowed_ids(end)
    position = temperature, sequence.seed, end, sequence.choice
    return RowParams._make(
        (*position, *numbers, prompt, output, sequence.forbidden_ids(end), allowed)
    )


def scoring_row(sequence: Sequence, start: int, end: int) -> ScoringRow | None:
    """Which prompt tokens the row of positions [start, end) scores; None if none."""
    if not sequence.scores_prompt:
        return None
    first = _first_logits(sequence, start, end)
    last = min(end, sequence.prompt_length - 1)
    params = sequence.request.params
    if first >= last:
        return None
    targets = sequence.request.prompt_token_ids[first + 1 : last + 1]
    beside = params.logprob_token_ids or params.prompt_logprobs
    return ScoringRow(sequence.key, sequence.request.request_id, first, targets, beside)


def _first_logits(sequence: Sequence, start: int, end: int) -> int:
    """The first position of the row [start, end) whose logits are wanted; `end` if none is.

    Prompt scores come from a stretch of the prompt up to its end and a sample from the last
    position, so the wanted logits are always a suffix of the row.
    """
    samples = sequence.generates and end == len(sequence.tokens)
    first = end - 1 if samples else end
    following = next_scored(sequence)
    if sequence.scores_prompt and following < sequence.prompt_length - 1:
        first = min(first, max(start, following))
    return first
