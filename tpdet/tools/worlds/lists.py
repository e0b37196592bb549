"""Values of flags that are lists: sizes, ranges of lengths, rules of row layers."""

from collections.abc import Collection, Iterable

from tpdet.arguments.suggestions import did_you_mean
from tpdet.errors import UsageError
from tpdet.kernels.order import ROW_LAYERS


def parse_names(kind: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """The names in a list such as "row,head", once each. Raises UsageError for an unknown one."""
    names = tuple(dict.fromkeys(text.split(",")))
    refuse_unknown(kind, names, known)
    return names


def refuse_unknown(kind: str, names: Iterable[str], known: Collection[str], use: str = "") -> None:
    """Raise UsageError for the first name that is not known. use: what to use, if not a list."""
    for name in names:
        if name not in known:
            remedy = use or f"some of {', '.join(known)}"
            raise UsageError(f"{kind} {name!r}: use {remedy}{did_you_mean(name, known)}")


def parse_row_layers(text: str, control: bool = False) -> tuple[str, ...]:
    """The names in "fold", "gather" or "fold,gather", in that order. Raises UsageError.

    The control replaces a fold by its stock all-reduce, so it needs "fold".
    """
    names = text.split(",")
    refuse_unknown("row layers", names, ROW_LAYERS, "fold, gather or fold,gather")
    if control and names != ["fold"]:
        raise UsageError("--control replaces a fold by a stock all-reduce: use --row-layers fold")
    return tuple(name for name in ROW_LAYERS if name in names)


def parse_sizes(text: str) -> tuple[int, ...]:
    """The integers of a list such as "1,2,4". Raises UsageError."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of numbers such as 1,2,4") from error
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{text!r}: sizes start at 1")
    return sizes


def parse_range(text: str) -> tuple[int, int]:
    """ "64:1024" as two numbers, "64" as twice the same. Raises UsageError."""
    parts = text.split(":")
    try:
        shortest, longest = int(parts[0]), int(parts[-1])
    except ValueError as error:
        raise UsageError(f"{text!r} is not a range of lengths such as 64:1024") from error
    if len(parts) > 2 or not 1 <= shortest <= longest:
        raise UsageError(f"{text!r} is not a range of lengths such as 64:1024")
    return shortest, longest
