"""Numbers of a command line that count something."""

from tpdet.errors import UsageError


def check_counts(options: object, *names: str) -> None:
    """Raise UsageError for the first of these fields below 1; None, a flag not given, passes."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: use 1 or more")
