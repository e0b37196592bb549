"""Ranges and limits of the fields of a request; `SamplingParams` declares its own by them."""

from dataclasses import dataclass

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS_IDS = 1024
MAX_SCHEMA_BYTES = 64 << 10
MAX_TOOL_BYTES = 256 << 10  # of the schemas that tool calls follow
MIN_TEMPERATURE = 1e-3  # what is below counts as 0
MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True)
class FieldRange:
    """Numbers from `low` to `high`, integers where `low` is one; `above_low` excludes `low`.

    `flag`: the help of a flag that `tpdet generate` has for the field; none where it is empty.
    """

    low: int | float
    high: int | float
    above_low: bool = False
    flag: str = ""

    @property
    def ends(self) -> list[int | float]:
        """Both ends, as `--print-limits` prints them."""
        return [self.low, self.high]

    def __repr__(self) -> str:
        return f"{'above ' * self.above_low}{self.low} to {self.high}"


COUNT = FieldRange(0, MAX_INT32)
TOKEN_ID = FieldRange(0, MAX_INT32)
ALTERNATIVES = FieldRange(0, 100)
PENALTY = FieldRange(-2.0, 2.0)
SEED = FieldRange(0, _MAX_INT64)
LOGIT_BIAS = FieldRange(-100.0, 100.0)
