"""Dates as text: 2026-01-31."""

import datetime
import re


def date_of(text: object) -> datetime.date | None:
    """The date that a text such as 2026-01-31 names; None for anything else."""
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return None
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None
