"""Which forms of the gated delta rule a GPU's steps take, beside the general one.

All have the same bits, so none reaches a result. A form runs for the heads with which
`admission.py` has found its bytes on this GPU; nothing else sets it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ALONE, WHOLE = "rows alone", "whole chunks"
"""`decode_rows.py`: sequences with one row; `whole_chunks.py`: chunks of 64 new rows."""

Heads = tuple[int, int, int, int]
"""Key heads and value heads of a rank, and their sizes."""
_admitted: dict[tuple[torch.device, Heads], frozenset[str]] = {}


def admitted(form: str, device: torch.device, heads: Heads) -> bool:
    """Whether steps of such heads take this form."""
    return form in _admitted.get((device, heads), frozenset())


def admit(device: torch.device, heads: Heads, forms: frozenset[str]) -> None:
    """From now on steps of such heads take these forms, and no others."""
    _admitted[device, heads] = forms


@contextmanager
def trying(device: torch.device, heads: Heads, forms: frozenset[str]) -> Iterator[None]:
    """Within, steps of such heads take these forms."""
    before = _admitted.get((device, heads), frozenset())
    admit(device, heads, forms)
    try:
        yield
    finally:
        admit(device, heads, before)
