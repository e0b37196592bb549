"""Logits to tokens and log-probabilities, row by row, by Rule 8.

Log-probabilities are those of the model's own distribution, before bias, penalties, temperature
and filters; or, where rows are `processed`, of what the token is sampled from, after all of them:
then an id that was removed is among no likeliest ids. Given tokens are always scored by the former.
A row's answer has the same bits alone or in any batch, and over any cut of the vocabulary. NaN or
+inf in a row's logits, or nothing finite in it, fails that row alone. The arithmetic is in the
kernels' files; R rows, T prompt positions, V ids, W columns of a shard.

`sample_columns` starts the work, `finish` waits for it: between them the device holds the tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tpdet.comm.exchange.rows import RowExchange, first_rows, row_places, share_of
from tpdet.control.row_messages import Beside, SampledToken
from tpdet.kernels import ops
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.inputs.row_params import PlainParams, RowParams
from tpdet.kernels.inputs.sampled_rows import RowAnswers, SampledRows, packed_samples
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.kernels.token_ranks import token_ranks
from tpdet.requests.request import Candidate

_LIKELIEST = RowParams(temperature=0.0, seed=0, position=0)
_COUNTED = -1  # in `PendingSample.ranks`: the rank is counted on the device
Counts = Sequence[Beside]
"""What each row returns beside its token; ids by their numbers only where rows are whole."""


@dataclass(frozen=True, slots=True)
class NumericalFailure:
    """A row that has no answer, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A step's answers on their way to the host.

    A later step may gather its token ids from `tokens` (int64 [R] on the device) before `finish`:
    it is 0 for a row that is not `fit` and -1 where no id is allowed, and both fail.
    """

    tokens: torch.Tensor
    packed: torch.Tensor
    """fp64 [R, 3] on the device: fit, token, logprob."""
    counts: tuple[Beside, ...]
    ranks: tuple[int, ...]
    """The tokens' ranks where they are known beforehand, else 0 (not asked for) or _COUNTED."""
    answers: torch.Tensor
    """fp64 on the host, whole once `copied`: [R, 3], [rows with counts, most, 2], then ranks."""
    copied: torch.cuda.Event | None
    processed: bool = False
    """Whether the likeliest are without removed ids."""

    @property
    def fit(self) -> torch.Tensor:
        """Which rows have an answer: bool [R] on the device."""
        return self.packed[:, 0] != 0.0


def sample_likeliest(logits: torch.Tensor, shard: Shard) -> PendingSample:
    """Begin to sample each row's likeliest token and nothing else: fp32 [R, W], R > 0."""
    sampled = ops.sample_rows(logits, [_LIKELIEST] * len(logits), shard)
    return _pending(logits, sampled, [None] * len(logits), (1,) * len(logits), shard)


def sample_shared(
    logits: torch.Tensor,
    params: Sequence[RowParams],
    counts: Counts,
    exchange: RowExchange,
    rank: int,
    ranks: int,
    vocab_size: int,
    processed: bool = False,
) -> PendingSample:
    """Begin to sample by shares of whole rows: fp32 [R, W] of every rank, R > 0, and R params.

    Params have no id lists. Each rank samples for its share of the rows over the whole vocabulary,
    then all gather the answers, with the likeliest `counts[row]` and the token's rank beside each.
    Called on every rank; equal on all.
    """
    _check(logits, len(params))
    first, share = first_rows(len(params), ranks)[rank], share_of(len(params), ranks)
    own = exchange.whole_rows(logits)[:, :vocab_size]
    shard = Shard(0, vocab_size)
    sampled_by = params[first : first + share]
    if processed and _changes_rows(sampled_by):
        sampled, own = ops.sample_processed(own, sampled_by, shard)
    else:
        sampled = ops.sample_answers(own, sampled_by, shard)
    known, answers, most = _ranks(params, counts), [sampled.answers.view(-1)], _most(counts)
    # Of every row: the ranks' answers must have one shape.
    if most:
        answers.append(_likeliest(own, sampled, list(range(share)), most, shard).view(-1))
    if _COUNTED in known:
        answers.append(token_ranks(own, sampled.answers[1].long(), shard).double())
    everyone = exchange.all_gather(torch.cat(answers) if len(answers) > 1 else answers[0])
    rows, counted = _with_counts(counts), _counted(known)
    places = row_places(len(params), ranks)
    returned = [*range(len(params)), *rows, *counted]
    at = to_device([places[row] for row in returned], logits.device)
    tokens, _, _, packed = ops.pack_answers(everyone, share, at[: len(params)])
    pieces, end = [packed.view(-1)], (4 + 2 * most) * share
    if rows:
        tops = everyone[:, 4 * share : end].reshape(ranks * share, -1)
        pieces.append(tops[at[len(params) : len(params) + len(rows)]].view(-1))
    if counted:
        pieces.append(everyone[:, end:].reshape(-1)[at[len(params) + len(rows) :]])
    host, copied = to_host(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
    return PendingSample(tokens, packed, tuple(counts), known, host, copied, processed)


def sample_columns(
    logits: torch.Tensor,
    params: Sequence[RowParams],
    counts: Counts,
    shard: Shard,
    processed: bool = False,
) -> PendingSample:
    """Begin to sample by columns, a rank's part of the vocabulary: fp32 [R, W], R params, R > 0.

    With the likeliest `counts[row]` and the token's rank beside each. Where the columns are a part,
    it is called on every rank, and is equal on all. Params are read before this returns. Raises
    ValueError when logits are not fp32 [R, W].
    """
    _check(logits, len(params))
    if processed and _changes_rows(params):
        answers, logits = ops.sample_processed(logits, params, shard)
        sampled = packed_samples(answers, ops.pack_answers)
    else:
        sampled = ops.sample_rows(logits, params, shard)
    return _pending(logits, sampled, counts, _ranks(params, counts), shard, processed)


def finish(pending: PendingSample) -> list[SampledToken | NumericalFailure]:
    """Wait for a pending sample: its R results, in order."""
    if pending.copied is not None:
        pending.copied.synchronize()
    count, counted = len(pending.counts), _counted(pending.ranks)
    answers = pending.answers.tolist()  # tensors of so few values cost more than a list
    last = len(answers) - len(counted)
    tops = _tops(answers[3 * count : last], pending.counts, pending.processed)
    ranks = list(pending.ranks)
    for row, rank in zip(counted, answers[last:], strict=True):
        ranks[row] = int(rank)
    fit, ids, logprobs = (answers[part : 3 * count : 3] for part in range(3))
    if not tops and all(fit) and min(ids) >= 0:
        fields = zip(ids, logprobs, ranks, strict=True)
        return [SampledToken(int(token), logprob, (), rank) for token, logprob, rank in fields]
    results: list[SampledToken | NumericalFailure] = []
    for row, (healthy, token, logprob) in enumerate(zip(fit, ids, logprobs, strict=True)):
        if not healthy:
            results.append(NumericalFailure("NaN or infinity in the logits"))
        elif token < 0:
            results.append(NumericalFailure("bias, forbidden and allowed ids exclude every token"))
        else:
            results.append(SampledToken(int(token), logprob, tops.get(row, ()), ranks[row]))
    return results


def sample(
    logits: torch.Tensor, params: Sequence[RowParams], counts: Counts, processed: bool = False
) -> list[SampledToken | NumericalFailure]:
    """A token for each whole row: `sample_columns` and `finish`; no rows, no results."""
    _check(logits, len(params))
    shard = Shard(0, logits.shape[1])
    return finish(sample_columns(logits, params, counts, shard, processed)) if params else []


def prompt_logprobs(
    logits: torch.Tensor, next_ids: Sequence[int], beside: Beside, shard: Shard | None = None
) -> list[SampledToken | NumericalFailure]:
    """Score given tokens: fp32 [T, W] and the T ids that followed -> T results, with ranks.

    `beside` each, at least 0 candidates. Raises ValueError when logits are not fp32 [T, W].
    """
    _check(logits, len(next_ids))
    if not next_ids:
        return []
    shard = shard or Shard(0, logits.shape[1])
    rows, scored = len(next_ids), ops.score_tokens(logits, next_ids, shard)
    return finish(_pending(logits, scored, [beside] * rows, (_COUNTED,) * rows, shard))


def _check(logits: torch.Tensor, rows: int) -> None:
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[0] != rows:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}; sampling {rows} rows takes "
            f"torch.float32 [{rows}, vocabulary]"
        )


def _changes_rows(params: Sequence[RowParams]) -> bool:
    """Whether any row's token is sampled from other numbers than its logits."""
    if isinstance(params, PlainRows):
        return any(way.changes_row for way in params.ways()[0])
    return any(how.changes_logits or PlainParams.of(how).changes_row for how in params)


def _pending(
    logits: torch.Tensor,
    sampled: SampledRows,
    counts: Counts,
    ranks: tuple[int, ...],
    shard: Shard,
    processed: bool = False,
) -> PendingSample:
    """The answers with the likeliest `counts[row]` beside each, copied to the host at once."""
    pieces = [sampled.packed.view(-1)]
    rows, counted = _with_counts(counts), _counted(ranks)
    if rows:
        pieces.append(_candidates(logits, sampled, rows, counts, shard).view(-1))
    if counted:
        own, tokens = logits, sampled.tokens
        if len(counted) < len(logits):
            at = to_device(counted, logits.device)
            own, tokens = logits[at], tokens[at]
        pieces.append(token_ranks(own, tokens, shard).double())
    answers, copied = to_host(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
    return PendingSample(
        sampled.tokens, sampled.packed, tuple(counts), ranks, answers, copied, processed
    )


def _ranks(params: Sequence[RowParams], counts: Counts) -> tuple[int, ...]:
    """What `PendingSample.ranks` says of rows: the likeliest token's is 1 without counting."""
    if isinstance(params, PlainRows):
        greedy = (params.temperatures == 0.0).tolist()
    else:
        greedy = [how.temperature == 0.0 and not how.changes_logits for how in params]
    return tuple(
        [
            1 if likeliest else 0 if count is None else _COUNTED
            for likeliest, count in zip(greedy, counts, strict=True)
        ]
    )


def _counted(ranks: Sequence[int]) -> list[int]:
    if _COUNTED not in ranks:
        return []
    return [row for row, rank in enumerate(ranks) if rank == _COUNTED]


def _with_counts(counts: Counts) -> list[int]:
    """The rows that return any of the likeliest."""
    return [row for row, count in enumerate(counts) if count] if any(counts) else []


def _most(counts: Counts) -> int:
    return max(map(_count, counts))


def _count(beside: Beside) -> int:
    return len(beside) if isinstance(beside, tuple) else beside or 0


def _candidates(
    logits: torch.Tensor, of: SampledRows, rows: list[int], counts: Counts, shard: Shard
) -> torch.Tensor:
    """What some rows return beside their tokens: ids, log-probabilities fp64 [rows, most, 2].

    A row that returns fewer is filled up with whatever ids. Raises ValueError for ids by their
    numbers where the columns are a part of the vocabulary.
    """
    most = _most(counts)
    named = {number: ids for number, row in enumerate(rows) if type(ids := counts[row]) is tuple}
    if not named:
        return _likeliest(logits, of, rows, most, shard)
    if shard.gather is not None:
        raise ValueError("given ids are read from whole rows of logits")
    columns = torch.zeros(len(rows), most, dtype=torch.int64, device=logits.device)
    for number, ids in named.items():
        columns[number, : len(ids)] = to_device([*ids], logits.device)
    others = [number for number in range(len(rows)) if number not in named]
    if others:
        tops, _ = ops.top_of_rows(logits, [rows[number] for number in others], most, shard)
        columns[to_device(others, logits.device), : tops.shape[1]] = tops
    at = to_device(rows, logits.device)
    values = logits[at].gather(1, columns) + 0.0
    logprobs = ops.log_probabilities(values, of.maximum[at, None], of.log_masses[at, None])
    return torch.stack([columns.double(), logprobs.double()], -1)


def _likeliest(
    logits: torch.Tensor, of: SampledRows | RowAnswers, rows: list[int], count: int, shard: Shard
) -> torch.Tensor:
    """The likeliest `count` ids of some rows and their log-probabilities: fp64 [rows, count, 2]."""
    ids, values = ops.top_of_rows(logits, rows, count, shard)
    at = to_device(rows, logits.device)
    logprobs = ops.log_probabilities(values, of.maximum[at, None], of.log_masses[at, None])
    return torch.stack([ids.double(), logprobs.double()], -1)


def to_device(numbers: Sequence[object], device: torch.device) -> torch.Tensor:
    """int64 numbers, or rows of them, on the device, without waiting for it."""
    values = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type != "cpu")
    return values.to(device, non_blocking=True)


def to_host(answers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """The same numbers on the host, and the event after which they are there."""
    if answers.device.type == "cpu":
        return answers, None
    host = torch.empty(answers.shape, dtype=answers.dtype, pin_memory=True)
    host.copy_(answers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


def _tops(
    answers: Sequence[float], counts: tuple[Beside, ...], processed: bool
) -> dict[int, tuple[Candidate, ...]]:
    """The `counts[row]` likeliest of each row that returns any, ties by lowest id.

    processed: without those that were removed, whose log-probability is -inf.
    """
    rows = _with_counts(counts)
    if not rows:
        return {}
    size = len(answers) // len(rows)  # an id and its log-probability in turn
    tops = {}
    for number, row in enumerate(rows):
        of_row = answers[number * size :][: 2 * _count(counts[row])]
        pairs: Iterable[tuple[float, float]] = zip(of_row[::2], of_row[1::2], strict=True)
        if processed:
            pairs = filter(_is_left, pairs)
        tops[row] = tuple([Candidate(int(token), logprob) for token, logprob in pairs])
    return tops


def _is_left(pair: tuple[float, float]) -> bool:
    """Whether an id, which stands beside its log-probability, may be sampled."""
    return pair[1] > -torch.inf
