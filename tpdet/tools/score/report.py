"""What `tpdet score` found, as JSON lines or as a table."""

import math
from collections.abc import Iterator, Sequence

import msgspec

from tpdet.llm.results import Logprob
from tpdet.text.outputs import logprob_bits, shortest_float32


class Score(msgspec.Struct, frozen=True, tag_field="object", tag="score"):
    """What was computed: equal values mean equal bits, but for those of `approximate` runs.

    tokens: of the text, the first one included.
    """

    contract: str
    model_digest: str
    system_fingerprint: str
    dtype: str
    tokens: int


class Alternative(msgspec.Struct, frozen=True):
    """A token that may stand at a position; text is None without a tokenizer.

    logprob: the shortest decimal of the fp32 value, -9999.0 for -inf; bits: the value itself, as 8
        hex digits, most significant first.
    rank: 1 for the likeliest of all ids.
    """

    id: int
    text: str | None
    logprob: float
    bits: str
    rank: int | None


class Token(msgspec.Struct, frozen=True, tag_field="object", tag="token"):
    """The token at a position, as `Alternative`; the first one has None for what it lacks.

    top: the likeliest tokens there, best first; empty unless they were asked for.
    """

    position: int
    id: int
    text: str | None
    logprob: float | None = None
    bits: str | None = None
    rank: int | None = None
    top: tuple[Alternative, ...] = ()


class Total(msgspec.Struct, frozen=True, tag_field="object", tag="total"):
    """Over the tokens that have a log-probability: count, sum (rounded once), mean, exp(-mean).

    perplexity: infinite, and null in JSON, where it is too large for a float.
    """

    scored: int
    sum: float
    mean: float
    perplexity: float


class ScoredText(msgspec.Struct, frozen=True):
    """All that is printed."""

    score: Score
    tokens: tuple[Token, ...]
    total: Total


def alternative(token_id: int, text: str | None, entry: Logprob) -> Alternative:
    """One entry of the engine's table of a position."""
    bits = logprob_bits(entry.logprob)
    return Alternative(token_id, text, shortest_float32(entry.logprob), bits, entry.rank)


def total(logprobs: Sequence[float]) -> Total:
    """The totals of fp32 log-probabilities, of which there is at least one."""
    whole = math.fsum(logprobs)
    mean = whole / len(logprobs)
    try:
        perplexity = math.exp(-mean)
    except OverflowError:
        perplexity = math.inf
    return Total(len(logprobs), whole, mean, perplexity)


def json_lines(scored: ScoredText) -> Iterator[str]:
    """A line for what was computed, one for each token, one for the totals."""
    for line in (scored.score, *scored.tokens, scored.total):
        yield msgspec.json.encode(line).decode()


def table_lines(scored: ScoredText) -> Iterator[str]:
    """An aligned table, with a position's other likely tokens below its token; then the totals."""
    head = ("position", "id", "logprob", "bits", "rank", "text")
    rows = [head, *(row for token in scored.tokens for row in _rows(token))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=True))
        yield "  ".join((*cells, row[-1]))
    score, whole = scored.score, scored.total
    yield ""
    yield f"tokens scored    {whole.scored}"
    yield f"log-probability  {whole.sum:.6f}, {whole.mean:.6f} a token"
    yield f"perplexity       {whole.perplexity:.6g}"
    yield f"contract         {score.contract}"
    yield f"model digest     {score.model_digest}"
    yield f"fingerprint      {score.system_fingerprint}"


def _rows(token: Token) -> Iterator[tuple[str, ...]]:
    yield (str(token.position), *_cells(token))
    for other in token.top:
        if other.id != token.id:
            yield ("", *_cells(other))


def _cells(entry: Token | Alternative) -> tuple[str, ...]:
    logprob = "-" if entry.logprob is None else f"{entry.logprob:.6f}"
    text = "-" if entry.text is None else repr(entry.text)
    return str(entry.id), logprob, entry.bits or "-", str(entry.rank or "-"), text
