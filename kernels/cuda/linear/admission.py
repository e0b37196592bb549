"""At a start: forms of the gated delta rule against the general one, byte by byte, on this GPU."""

from collections.abc import Callable

import torch

from tpdet.kernels.cuda.linear import delta_rule, forms
from tpdet.kernels.cuda.linear.decode_launch import takes_rows_alone
from tpdet.kernels.cuda.linear.whole_chunks_launch import takes_whole_chunks
from tpdet.kernels.inputs.linear_state import BLOCK_ROWS, TAPS, DeltaGates, LinearState
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS

_Rows = tuple[torch.Tensor, ...]
_PROMPT = 4 * CHUNK_TOKENS + 9
_KEPT = 2
"""The chunk of a prompt at whose start a snapshot is taken."""
_STARTS = (1, 15, 16, 40, 63)
"""Positions of rows that are a sequence's only ones: in each block, at the ends of some."""


def admit_forms(heads: forms.Heads, device: torch.device) -> tuple[list[str], list[str]]:
    """Try the forms for heads in bf16 of a rank, and take those with the general form's bytes.

    Each is tried beside those that were taken before it, as steps will have it.
    Returns their names, and of each of the others its name and what was wrong.
    """
    kept: list[str] = []
    failed: list[str] = []
    device = torch.empty(0, device=device).device  # with its index, as tensors have it
    _, _, key_size, value_size = heads
    tries: tuple[tuple[str, bool, Callable[..., list[torch.Tensor]]], ...] = (
        (forms.ALONE, takes_rows_alone(key_size, device), _rows_alone),
        (forms.WHOLE, takes_whole_chunks(key_size, value_size, device), _prompt),
    )
    for form, fits, run in tries:
        if not fits:
            continue
        try:
            with forms.trying(device, heads, frozenset(kept)):
                general = run(heads, device)
            with forms.trying(device, heads, frozenset([*kept, form])):
                got = run(heads, device)
            equal = all(map(_same_bytes, got, general))
        except Exception as error:  # a compiler's or a driver's: the general form needs neither
            failed.append(f"{form}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if equal:
            kept.append(form)
        else:
            failed.append(f"{form}: other bytes than the general form")
    forms.admit(device, heads, frozenset(kept))
    return kept, failed


def _same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def _drawn(rows: int, heads: forms.Heads, device: torch.device) -> tuple[_Rows, DeltaGates]:
    """q, k, v, a, b with heavy tails, and gates of heads that forget at once to hardly."""
    key_heads, value_heads, key_size, value_size = heads
    generator = torch.Generator(device).manual_seed(rows)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(rows, *sizes, generator=generator, device=device)

    def heavy(*sizes: int) -> torch.Tensor:
        return (normal(*sizes) * (2 * normal(*sizes)).exp()).bfloat16()

    q, k = (heavy(key_heads, key_size) for _ in "qk")
    v, a, b = heavy(value_heads, value_size), normal(value_heads), 2 * normal(value_heads)
    decays = torch.linspace(0.01, 16, value_heads, device=device).log()
    gates = DeltaGates(decays, torch.linspace(-7, 1, value_heads, device=device))
    return (q, k, v, a, b), gates


def _state(slots: int, heads: forms.Heads, device: torch.device) -> LinearState:
    """States of sequences without rows, and a snapshot; what nobody may read is NaN or far off."""
    key_heads, value_heads, key_size, value_size = heads
    ring = slots, 2 * CHUNK_TOKENS

    def poison(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((*ring, *sizes), torch.nan, dtype=dtype, device=device)

    return LinearState(
        torch.zeros(slots + 1, value_heads, key_size, value_size, device=device),
        poison(key_heads, key_size, dtype=torch.bfloat16),
        poison(value_heads, value_size),
        poison(value_heads, BLOCK_ROWS),
        torch.full((*ring, value_heads), -(2**60), device=device),
        poison(1, dtype=torch.bfloat16),
        torch.zeros(1, TAPS - 1, 1, dtype=torch.bfloat16, device=device),
    )


def _run(
    rows: _Rows, gates: DeltaGates, state: LinearState, *spans: tuple[int, int]
) -> torch.Tensor:
    """o of sequences that have (start, count) rows, one after the other, slot by slot."""
    sequences, first = [], 0
    for slot, (start, count) in enumerate(spans):
        pages = (0,) * -(-(start + count) // PAGE_TOKENS)
        standing = max(start - 1, 0) // CHUNK_TOKENS
        kept = ((_KEPT, len(state.keys)),)
        sequences.append(PagedSequence(first, count, start, pages, slot, standing, False, kept))
        first += count
    batch = make_batch(tuple(sequences), rows[0].device)
    q, k, v, a, b = rows
    return delta_rule.gated_delta(q, k, v, a, b, gates, state, batch)


def _rows_alone(heads: forms.Heads, device: torch.device) -> list[torch.Tensor]:
    """Prompts up to each start, then a row each: its o, and the states behind it."""
    state = _state(len(_STARTS), heads, device)
    rows, gates = _drawn(sum(_STARTS), heads, device)
    with forms.trying(device, heads, frozenset()):
        _run(rows, gates, state, *((0, start) for start in _STARTS))
    rows, gates = _drawn(len(_STARTS), heads, device)
    return [_run(rows, gates, state, *((start, 1) for start in _STARTS)), *state]


def _prompt(heads: forms.Heads, device: torch.device) -> list[torch.Tensor]:
    """A prompt of several chunks from within one: its o, the state behind it, a snapshot."""
    state = _state(1, heads, device)
    rows, gates = _drawn(_PROMPT, heads, device)
    begun = [part[:9] for part in rows], [part[9:] for part in rows]
    _run(tuple(begun[0]), gates, state, (0, 9))
    return [_run(tuple(begun[1]), gates, state, (9, _PROMPT - 9)), state.boundary]
