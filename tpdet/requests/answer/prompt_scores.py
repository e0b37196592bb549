"""A prompt's log-probabilities between the engine and an answer: packed, and in parts.

An object of Python's takes a hundred bytes; a million of them would block the HTTP process for half
a second. Packed, each takes eight bytes, and a message holds a bounded part.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tpdet.control.row_messages import SampledToken
from tpdet.requests.body.limits import MAX_PART_LOGPROBS
from tpdet.requests.request import Candidate, PromptOutput


class PromptPart(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the next tokens of a request's prompt; parts come in order.

    Of T tokens with `width` alternatives each: `logprobs` fp32 [T] (NaN: the token has none),
    `ranks` uint32 [T], `ids` uint32 [T, width] and `values` fp32 [T, width], best first, all in the
    machine's byte order. `weights`: as in `TokenOutput`.
    """

    request_id: str
    width: int
    logprobs: bytes
    ranks: bytes
    ids: bytes
    values: bytes
    weights: int = 0

    @property
    def size(self) -> int:
        """How many log-probabilities it holds."""
        return (len(self.logprobs) + len(self.values)) // 4


def parts_of(prompt: PromptOutput) -> Iterator[PromptPart]:
    """The scores of a prompt in parts of at most MAX_PART_LOGPROBS each."""
    start, total = 0, len(prompt.logprobs)
    while start < total:
        width = len(prompt.top[start])
        most = start + max(1, MAX_PART_LOGPROBS // (width + 1))
        end = start + 1
        while end < min(total, most) and len(prompt.top[end]) == width:
            end += 1
        logprobs = (math.nan if value is None else value for value in prompt.logprobs[start:end])
        tops = prompt.top[start:end]
        yield PromptPart(
            prompt.request_id,
            width,
            array("f", logprobs).tobytes(),
            array("I", prompt.ranks[start:end]).tobytes(),
            array("I", [one.token_id for top in tops for one in top]).tobytes(),
            array("f", [one.logprob for top in tops for one in top]).tobytes(),
            prompt.weights,
        )
        start = end


def messages_of(prompts: Iterable[PromptOutput]) -> Iterator[tuple[PromptPart, ...]]:
    """The parts of several prompts, in groups that a message may hold."""
    group: list[PromptPart] = []
    size = 0
    for prompt in prompts:
        for part in parts_of(prompt):
            if group and size + part.size > MAX_PART_LOGPROBS:
                yield tuple(group)
                group, size = [], 0
            group.append(part)
            size += part.size
    if group:
        yield tuple(group)


class PromptScores:
    """The parts of one prompt, as they have come."""

    def __init__(self) -> None:
        self._parts: list[PromptPart] = []

    def add(self, part: PromptPart) -> None:
        """Take the next part."""
        self._parts.append(part)

    def tokens(self, ids: Sequence[int]) -> Iterator[SampledToken | None]:
        """The prompt's tokens with their log-probabilities; None where there is none.

        Raises ValueError when `ids` are not as many as were scored.
        """
        scores = (score for part in self._parts for score in _scores(part))
        for token_id, (logprob, rank, top) in zip(ids, scores, strict=True):
            yield None if math.isnan(logprob) else SampledToken(token_id, logprob, top, rank)


def _scores(part: PromptPart) -> Iterator[tuple[float, int, tuple[Candidate, ...]]]:
    width = part.width
    ids, values = memoryview(part.ids).cast("I"), memoryview(part.values).cast("f")
    logprobs, ranks = memoryview(part.logprobs).cast("f"), memoryview(part.ranks).cast("I")
    for index, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True)):
        span = slice(index * width, (index + 1) * width)
        yield logprob, rank, tuple(map(Candidate, ids[span], values[span]))
