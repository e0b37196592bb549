"""The cursor of a stream: what computes it, its seed, and how many tokens each choice has so far.

An event's `id:` line holds it, as `1.CONTRACT.WEIGHTS.SEED.CHECKSUM.COUNTS`: the first 12 hex
digits of contract id and model digest, the seed in decimal, 8 hex digits, and a count for each
choice with `-` between them. It begins with `1p` where log-probabilities are processed. The answer
is a function of the request, so counts are enough to go on anywhere; the checksum shows that the
tokens and bits which are not sent again are the same.
"""

import re
import struct
from typing import NamedTuple
from zlib import crc32

from tpdet.requests.engine_facts import PROCESSED_LOGPROBS, RAW_LOGPROBS, AnswerOrigin, LogprobsMode
from tpdet.requests.field_ranges import SEED

VERSIONS: dict[str, LogprobsMode] = {"1": RAW_LOGPROBS, "1p": PROCESSED_LOGPROBS}
DIGITS = 12  # of a contract id and of a model digest, as in a system fingerprint
MOST_CHOICES = 128  # of a stream whose events have cursors, which would grow too long

_TOKEN = struct.Struct("<IIIf")  # choice, position, token id, log-probability
_MASK = 0xFFFFFFFF
_SEED, _COUNT = "(?:0|[1-9][0-9]{0,18})", "(?:0|[1-9][0-9]{0,9})"  # as written, each in one way
_FORM = re.compile(
    rf"(1p?)\.([0-9a-f]{{{DIGITS}}})\.([0-9a-f]{{{DIGITS}}})\.({_SEED})\.([0-9a-f]{{8}})"
    rf"\.({_COUNT}(?:-{_COUNT})*)"
)


class Cursor(NamedTuple):
    """A cursor's fields; `counts` has a number for each choice of each prompt."""

    origin: AnswerOrigin
    seed: int
    checksum: int
    counts: tuple[int, ...]


def read_cursor(text: str) -> Cursor:
    """The cursor that a text is. Raises ValueError for any other text."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError("it is no cursor of a stream")
    version, contract, weights, seed, checksum, counts = found.groups()
    if int(seed) > SEED.high:
        raise ValueError(f"its seed is {seed}")
    numbers = tuple(map(int, counts.split("-")))
    if int(checksum, 16) and not any(numbers):
        raise ValueError(f"its checksum of no tokens is {checksum}")
    origin = AnswerOrigin(contract, weights, VERSIONS[version])
    return Cursor(origin, int(seed), int(checksum, 16), numbers)


def cursor_head(origin: AnswerOrigin, seed: int) -> bytes:
    """What all cursors of a stream begin with."""
    (version,) = (name for name, mode in VERSIONS.items() if mode == origin.logprobs_mode)
    return f"{version}.{origin.contract[:DIGITS]}.{origin.weights[:DIGITS]}.{seed}".encode()


class StreamProgress:
    """The tokens of an answer so far: their number in each choice, and a checksum of them all.

    The checksum is a sum, so it does not depend on which choice is ahead.
    """

    def __init__(self, choices: int) -> None:
        self.counts = [0] * choices
        self.checksum = 0
        self._texts = [b"0"] * choices

    def add(self, choice: int, token_id: int, logprob: float) -> None:
        """The next token of a choice, with its fp32 log-probability."""
        count = self.counts[choice]
        token = crc32(_TOKEN.pack(choice, count, token_id, logprob))
        self.checksum = (self.checksum + token) & _MASK
        self.counts[choice] = count = count + 1
        self._texts[choice] = b"%d" % count

    def tail(self) -> bytes:
        """What follows a cursor's head."""
        return b"%08x.%b" % (self.checksum, b"-".join(self._texts))
