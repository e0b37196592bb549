"""What a `system_fingerprint` says: contract, weights and architecture. Needs no torch."""

import re
from typing import NamedTuple

_WHOLE = re.compile(
    r"tpdet-([0-9a-f]{12})-([0-9a-f]{12})-(cpu-[a-z0-9_.-]+-[0-9a-f]{8}|sm_\d+(?:-[0-9a-f]{8})?)"
)
"""Earlier versions of tpdet named a GPU by its capability alone."""


class Fingerprint(NamedTuple):
    """The first 12 digits of contract id and model digest, and the architecture."""

    contract: str
    weights: str
    architecture: str


def read_fingerprint(text: object) -> Fingerprint | None:
    """The parts of a strict answer's fingerprint; None for anything else."""
    found = _WHOLE.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else Fingerprint(*found.groups())
