"""The range of every sampling field, stated once.

The checks of `SamplingParams`, the published schema of the HTTP API and `--print-limits` all read
these declarations.
"""

import math
from dataclasses import dataclass

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS_IDS = 1024
MAX_SCHEMA_BYTES = 64 << 10
MIN_TEMPERATURE = 1e-3  # what is below counts as 0
_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, integers where `low` is one; `above_low` excludes `low`."""

    low: int | float
    high: int | float
    above_low: bool = False

    @property
    def ends(self) -> list[int | float]:
        """Both ends, as `--print-limits` prints them."""
        return [self.low, self.high]


COUNT = Range(0, _MAX_INT32)
TOKEN_ID = Range(0, _MAX_INT32)
ALTERNATIVES = Range(0, 20)
PENALTY = Range(-2.0, 2.0)
SEED = Range(0, _MAX_INT64)
LOGIT_BIAS = Range(-100.0, 100.0)

RANGES = {
    "n": Range(1, 128),
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0, above_low=True),
    "top_k": Range(-1, _MAX_INT32),
    "min_p": Range(0.0, 1.0),
    "seed": SEED,
    "max_tokens": COUNT,
    "min_tokens": COUNT,
    "logprobs": ALTERNATIVES,
    "prompt_logprobs": ALTERNATIVES,
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": Range(0.0, math.inf, above_low=True),
}
"""By the names of `SamplingParams`, of those fields that are one number."""
