"""`RequestOutputKind`: what `AsyncLLM` yields of an answer that grows, by vLLM's names."""

from enum import IntEnum

from tpdet.errors import RequestError


class RequestOutputKind(IntEnum):
    """CUMULATIVE: everything so far; DELTA: what is new; FINAL_ONLY: the whole answer, once."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def read_output_kind(value: object) -> RequestOutputKind:
    """The kind of a number or a like-named enumeration; None: CUMULATIVE. Raises RequestError."""
    number = 0 if value is None else getattr(value, "value", value)
    if isinstance(number, int) and number in {*RequestOutputKind}:
        return RequestOutputKind(number)
    names = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
    raise RequestError(f"output_kind {value!r} is none of {names}", "output_kind")
