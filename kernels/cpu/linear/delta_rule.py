"""The gated delta rule by rows: one definition for prefill, chunk, decode and drafts.

Chunks of 64 absolute positions, blocks of 16. Of a value head with boundary state S [Dk, Dv], raw
keys k and queries q (Yang et al. 2024, arXiv 2412.06464; the keys' norms are factors here):

    n_i = fp32(1 / sqrt(sum k_i^2 + 1e-6)),  m_i = fp32(the same of q_i) * fp32(Dk^-0.5)
    d_ij = decay of the rows after j up to i,  e_i = decay from the chunk's start, row i's included
    p_ij = d_ij * (k_i . k_j),  p'_ij = d_ij * (q_i . k_j),  c_i = b_i * n_i
    r_i = c_i * (v_i - n_i * (e_i * (S' k_i) + sum_{j in earlier blocks} p_ij w_j))
    T_i = 1_i + sum_{j < i of the block} -((c_i * n_i) * p_ij) * T_j        rows of 16, ascending j
    w_i = sum_{j <= i of the block} T_ij r_j
    o_i = round(m_i * ((e_i * (S' q_i) + sum_{earlier blocks} p'_ij w_j) + sum_{block} p'_ij w_j))
    S'' = e_C * S + sum_j k_j (d_Cj * w_j)'

T_i is summed in fp32 without fma; every other sum is a `product`. Decays: `exact/decays.py`. A row
i reads rows j <= i alone. Others are zeros in its products, and so that 0 * inf cannot be: where a
column of r (of w in o) is not finite it counts as 0, and is NaN in this row and all below it of the
block. k, l, r and T_i are stored when first computed.
"""

from collections.abc import Callable, Sequence
from itertools import product as pairs_of
from typing import NamedTuple

import torch

from tpdet.kernels.cpu.pointwise.norm import reciprocal_length
from tpdet.kernels.exact.decays import decay_of, log_decays, sigmoid
from tpdet.kernels.inputs.linear_state import (
    BLOCK_ROWS,
    LENGTH_EPS,
    DeltaGates,
    LinearState,
    StateMove,
    terms_of,
)
from tpdet.kernels.inputs.paged_batch import PagedBatch, PagedSequence
from tpdet.kernels.order import CHUNK_TOKENS

_AT_ONCE = 32  # sequences whose blocks are computed side by side


class _Rows(NamedTuple):
    """A step's rows: q, k, v [M, heads, D]; keys' and queries' factors [M, Hk]; w's [M, Hv]; l."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_factor: torch.Tensor
    query_factor: torch.Tensor
    strength: torch.Tensor
    decays: torch.Tensor


class _Factors(NamedTuple):
    """v [P, Hv, 16, Dv] of a block's rows, and their c, n and m [P, Hv, 16, 1]."""

    value: torch.Tensor
    strength: torch.Tensor
    key: torch.Tensor
    query: torch.Tensor


class _Piece(NamedTuple):
    """Positions [first, last) of the batch's sequence of this number; they lie in a block of 16."""

    number: int
    sequence: PagedSequence
    first: int
    last: int

    @property
    def chunk(self) -> int:
        return self.first // CHUNK_TOKENS


class _Chunks(NamedTuple):
    """Rows of chunks in the rings, as an index: slots [P, 1] and places [P, 64]."""

    slots: torch.Tensor
    rings: torch.Tensor


class _Layout(NamedTuple):
    """Where the rows of pieces lie, whose blocks have 16 rows [P, 16] and chunks 64 [P, 64].

    in_chunk: the block's rows in the chunk; ring: in the rings; new, older: which of them are this
    step's, and which an earlier one's; earlier, known: the chunk's rows before the block, and up to
    the last new one; number: the step's row of each new one, else 0; live: rows that may be new.
    """

    chunks: _Chunks
    in_chunk: torch.Tensor
    ring: tuple[torch.Tensor, torch.Tensor]
    new: torch.Tensor
    older: torch.Tensor
    earlier: torch.Tensor
    known: torch.Tensor
    number: torch.Tensor
    live: slice

    @property
    def stored_new(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The new rows' places in the rings, one after the other."""
        slots, places = self.ring
        return slots.expand_as(self.new)[self.new], places[self.new]


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    gates: DeltaGates,
    state: LinearState,
    batch: PagedBatch,
) -> torch.Tensor:
    """q, k [M, Hk, Dk], v [M, Hv, Dv] behind the convolution, a, b [M, Hv] -> o [M, Hv, Dv].

    Value head h reads key head h // (Hv / Hk). A sequence whose first row begins a chunk that its
    state does not stand for has it moved first, in place. Where its rows go past the end of a
    chunk the state moves in place too, of a run with drafts in scratch; where a sequence says so, a
    chunk's start is kept as a snapshot. Raises ValueError where a state stands elsewhere, or drafts
    cross two ends of chunks.
    """
    check_states(batch)
    strength = sigmoid(b)
    key_factor = reciprocal_length(k.float(), LENGTH_EPS)
    query_factor = reciprocal_length(q.float(), LENGTH_EPS) * q.shape[2] ** -0.5
    per_key = v.shape[1] // k.shape[1]
    strength = strength * key_factor.repeat_interleave(per_key, 1)
    rows = _Rows(q, k, v, key_factor, query_factor, strength, log_decays(a, gates))
    out = torch.zeros(v.shape, dtype=v.dtype)
    advance_states((state,), late_moves(batch))
    scratch: dict[int, torch.Tensor] = {}
    for pieces in _rounds(batch.sequences):
        _compute(pieces, rows, state, scratch, out)
    return out


def advance_states(states: Sequence[LinearState], moves: Sequence[StateMove]) -> None:
    """Write boundary[target] of each move: the state of its source behind all rows of the chunk.

    states: of all layers.
    """
    for state, move in pairs_of(states, moves):
        chunks = _chunks(torch.tensor([move.source]), torch.tensor([move.chunk]), state)
        moved = _advanced(state.boundary[move.source][None], chunks, state)
        state.boundary[move.target] = moved[0]


def product(
    left: torch.Tensor, right: torch.Tensor, left_terms: int = 1, right_terms: int = 1
) -> torch.Tensor:
    """left [B, M, K] @ right [B, K, N] in fp32, each term's product a chain from +0.

    An operand of two terms is fp32, and is taken as bf16(x) + bf16(x - bf16(x)). The sum is
    (low high' + high low') + high high', without the first product where one operand is exact.
    """
    highs = [_high(x, terms) for x, terms in ((left, left_terms), (right, right_terms))]
    total = chain(*highs)
    small = []
    if left_terms == 2:
        small.append(chain(_high(left - highs[0], 2), highs[1]))
    if right_terms == 2:
        small.append(chain(highs[0], _high(right - highs[1], 2)))
    if len(small) == 2:
        return (small[0] + small[1]) + total
    return small[0] + total if small else total


def chain(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [B, M, K] @ right [B, K, N], fp32; M, K and N never depend on a step or a rank."""
    return torch.bmm(left.contiguous(), right.contiguous())


def _high(x: torch.Tensor, terms: int) -> torch.Tensor:
    return x.bfloat16().float() if terms == 2 else x


def late_moves(batch: PagedBatch) -> tuple[StateMove, ...]:
    """The moves of sequences whose first row begins a chunk that their state does not stand for."""
    return tuple(
        StateMove(sequence.slot, sequence.slot, sequence.standing)
        for sequence in batch.sequences
        if sequence.count and sequence.standing < sequence.start // CHUNK_TOKENS
    )


def check_states(batch: PagedBatch) -> None:
    """Raise ValueError where a state stands elsewhere, or drafts cross two ends of chunks."""
    for sequence in batch.sequences:
        chunk = sequence.start // CHUNK_TOKENS
        if not sequence.count:
            continue
        if sequence.standing not in (chunk - 1, chunk):
            raise ValueError(
                f"slot {sequence.slot}: its state stands for chunk {sequence.standing}, and "
                f"rows begin in chunk {chunk}: only the stored rows of one chunk can be added"
            )
        if sequence.drafts and (sequence.length - 1) // CHUNK_TOKENS > chunk + 1:
            raise ValueError(
                f"slot {sequence.slot}: drafts at positions {sequence.start} to "
                f"{sequence.length - 1} cross two ends of chunks; one step takes one"
            )


def _rounds(sequences: tuple[PagedSequence, ...]) -> list[list[_Piece]]:
    """Pieces that are computed together, in order: the n-th ones of sequences."""
    rounds: list[list[_Piece]] = []
    for index, sequence in enumerate(sequences):
        first, turn = sequence.start, 0
        while first < sequence.length:
            last = min((first // BLOCK_ROWS + 1) * BLOCK_ROWS, sequence.length)
            if turn == len(rounds):
                rounds.append([])
            rounds[turn].append(_Piece(index, sequence, first, last))
            first, turn = last, turn + 1
    return [
        pieces[first : first + _AT_ONCE]
        for pieces in rounds
        for first in range(0, len(pieces), _AT_ONCE)
    ]


def _chunks(slots: torch.Tensor, chunks: torch.Tensor, state: LinearState) -> _Chunks:
    """slots and chunks [P]."""
    first = chunks * CHUNK_TOKENS % state.keys.shape[1]
    return _Chunks(slots[:, None], first[:, None] + torch.arange(CHUNK_TOKENS))


def _lay_out(pieces: list[_Piece], state: LinearState) -> _Layout:
    """Where the pieces' rows lie."""
    slots = torch.tensor([piece.sequence.slot for piece in pieces])
    blocks = torch.tensor([p.first % CHUNK_TOKENS // BLOCK_ROWS * BLOCK_ROWS for p in pieces])
    chunks = _chunks(slots, torch.tensor([piece.chunk for piece in pieces]), state)
    first = torch.tensor([piece.first % BLOCK_ROWS for piece in pieces])[:, None]
    last = torch.tensor([(piece.last - 1) % BLOCK_ROWS + 1 for piece in pieces])[:, None]
    begin = [p.sequence.first_row + p.first - p.sequence.start for p in pieces]
    inside = torch.arange(BLOCK_ROWS)
    new = (inside >= first) & (inside < last)
    number = torch.where(new, torch.tensor(begin)[:, None] - first + inside, 0)
    in_chunk = blocks[:, None] + inside
    return _Layout(
        chunks,
        in_chunk,
        (slots[:, None], chunks.rings.gather(1, in_chunk)),
        new,
        inside < first,
        torch.arange(CHUNK_TOKENS) < blocks[:, None],
        torch.arange(CHUNK_TOKENS) < blocks[:, None] + last,
        number,
        slice(int(first.min()), int(last.max())),
    )


def _compute(
    pieces: list[_Piece],
    rows: _Rows,
    state: LinearState,
    scratch: dict[int, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """One block of each of several sequences: stores k, l, T and r, writes o, moves full chunks."""
    layout = _lay_out(pieces, state)
    new, number = layout.new, layout.number
    stored = layout.stored_new
    state.keys[stored], state.decays[stored] = rows.k[number[new]], rows.decays[number[new]]
    boundary = _boundary(pieces, layout.chunks, state, scratch)
    for piece, begun in zip(pieces, boundary, strict=True):
        if piece.first % CHUNK_TOKENS == 0 and piece.chunk in piece.sequence.kept:
            state.boundary[piece.sequence.kept[piece.chunk]] = begun
    total, own = _from_before(layout, rows, state, boundary)
    keys, queries = own.chunk(2, 2)  # p and p' inside the block [P, Hv, 16, 16]
    factors = _factors(rows, number)
    inverse = _select(state.inverses[layout.ring], layout.older).transpose(1, 2)
    inverse = _invert(-(factors.strength * factors.key * keys), inverse, new, layout.live)
    rest = _select(state.updates[layout.ring], layout.older).transpose(1, 2)
    fresh = factors.strength * (factors.value - factors.key * total[:, :, :BLOCK_ROWS])
    rest = torch.where(new[:, None, :, None], fresh, rest)
    state.inverses[stored] = inverse.transpose(1, 2)[new]
    state.updates[stored] = rest.transpose(1, 2)[new]
    terms = terms_of(rows.k.dtype)
    lower = torch.ones(BLOCK_ROWS, BLOCK_ROWS, dtype=torch.bool).tril()
    seen = _below(torch.where(lower, queries, 0.0), _below(inverse, rest, terms), terms)
    made = factors.query * (total[:, :, BLOCK_ROWS:] + seen)
    out[number[new]] = made.transpose(1, 2)[new].to(out.dtype)
    _move_full_chunks(pieces, layout.chunks, state, scratch, boundary)


def _from_before(
    layout: _Layout, rows: _Rows, state: LinearState, boundary: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What states and earlier blocks give a block's keys, then queries [P, Hv, 32, Dv].

    And p, then p', of the block's own columns [P, Hv, 32, 16].
    """
    chunk = layout.chunks
    keys = _select(state.keys[chunk], layout.known).float()
    sums = _select(state.decays[chunk], layout.known).cumsum(1)
    per_key, terms = rows.v.shape[1] // rows.k.shape[1], terms_of(rows.k.dtype)
    key_rows = keys[torch.arange(len(keys))[:, None], layout.in_chunk]
    query_rows = _select(rows.q[layout.number], layout.new).float()
    both = torch.cat([key_rows, query_rows], 1).transpose(1, 2)  # [P, Hk, 32, Dk]
    scores = _by_head(chain, both, keys.permute(0, 2, 3, 1)).repeat_interleave(per_key, 1)
    both = both.repeat_interleave(per_key, 1)
    of_state = _by_head(lambda x, y: product(x, y, 1, terms), both, boundary)
    block_sums = sums.gather(1, layout.in_chunk[..., None].expand(-1, -1, sums.shape[2]))
    decay = _between(block_sums, sums, layout.in_chunk, layout.live)  # [P, Hv, 16, 64]
    weights = decay.repeat(1, 1, 2, 1) * scores
    before = torch.where(layout.earlier[:, None, None, :], weights, 0.0)
    updates = _updates(chunk, layout.earlier, state, terms)
    of_rows = _by_head(lambda x, y: product(x, y, terms, terms), before, updates)
    begun = decay_of(block_sums).transpose(1, 2).repeat(1, 1, 2)[..., None]
    columns = layout.in_chunk[:, None, None, :].expand(-1, weights.shape[1], 2 * BLOCK_ROWS, -1)
    return begun * of_state + of_rows, weights.gather(3, columns)


def _boundary(
    pieces: list[_Piece], chunks: _Chunks, state: LinearState, scratch: dict[int, torch.Tensor]
) -> torch.Tensor:
    """[P, Hv, Dk, Dv]: the state at the start of each piece's chunk."""
    boundary = state.boundary[chunks.slots[:, 0]]
    for number, piece in enumerate(pieces):
        if piece.sequence.drafts and piece.chunk != piece.sequence.start // CHUNK_TOKENS:
            boundary[number] = scratch[piece.number]
    return boundary


def _move_full_chunks(
    pieces: list[_Piece],
    chunks: _Chunks,
    state: LinearState,
    scratch: dict[int, torch.Tensor],
    boundary: torch.Tensor,
) -> None:
    """The state behind a chunk that a piece ends, where its sequence has rows in the next one."""
    full = [
        number
        for number, piece in enumerate(pieces)
        if piece.last % CHUNK_TOKENS == 0 and piece.last < piece.sequence.length
    ]
    if not full:
        return
    moved = _advanced(boundary[full], _Chunks(*(part[full] for part in chunks)), state)
    for row, number in enumerate(full):
        if pieces[number].sequence.drafts:
            scratch[pieces[number].number] = moved[row]
        else:
            state.boundary[pieces[number].sequence.slot] = moved[row]


def _advanced(boundary: torch.Tensor, chunks: _Chunks, state: LinearState) -> torch.Tensor:
    """e_C * S + sum_j k_j (d_Cj * w_j)' of whole chunks: [P, Hv, Dk, Dv]."""
    keys = state.keys[chunks].float().permute(0, 2, 3, 1)  # [P, Hk, Dk, 64]
    sums = state.decays[chunks].cumsum(1)
    left = decay_of(sums[:, -1:] - sums).transpose(1, 2)
    terms = terms_of(state.keys.dtype)
    whole = torch.ones(chunks.rings.shape, dtype=torch.bool)
    updates = left[..., None] * _updates(chunks, whole, state, terms)  # [P, Hv, 64, Dv]
    keys = keys.repeat_interleave(updates.shape[1] // keys.shape[1], 1)
    added = _by_head(lambda x, y: product(x, y, 1, terms), keys, updates)
    return decay_of(sums[:, -1])[..., None, None] * boundary + added


def _between(
    block_sums: torch.Tensor, sums: torch.Tensor, of_block: torch.Tensor, live: slice
) -> torch.Tensor:
    """d_ij [P, Hv, 16, 64] of a block's rows i and a chunk's rows j <= i; 0 of others.

    Only rows of `live` are computed.
    """
    pieces, _, heads = sums.shape
    visible = torch.zeros(pieces, BLOCK_ROWS, CHUNK_TOKENS, dtype=torch.bool)
    visible[:, live] = torch.arange(CHUNK_TOKENS) <= of_block[:, live, None]
    differences = block_sums[:, :, None] - sums[:, None]  # [P, 16, 64, Hv]
    decay = torch.zeros(pieces, BLOCK_ROWS, CHUNK_TOKENS, heads)
    decay[visible] = decay_of(differences[visible])
    return decay.permute(0, 3, 1, 2)


def _updates(chunks: _Chunks, kept: torch.Tensor, state: LinearState, terms: int) -> torch.Tensor:
    """w of the kept rows [P, 64] of chunks, zeros in others: [P, Hv, 64, Dv]."""
    rings = state.updates, state.inverses
    rest, inverse = (
        _select(ring[chunks], kept).transpose(1, 2).unflatten(2, (-1, BLOCK_ROWS)).flatten(0, 1)
        for ring in rings
    )
    return _below(inverse, rest, terms).view(len(kept), -1, CHUNK_TOKENS, rest.shape[3])


def _factors(rows: _Rows, number: torch.Tensor) -> _Factors:
    """The factors of rows number [P, 16] of a step."""
    per_key = rows.v.shape[1] // rows.k.shape[1]
    of_heads = (
        rows.strength[number],
        rows.key_factor[number].repeat_interleave(per_key, 2),
        rows.query_factor[number].repeat_interleave(per_key, 2),
    )
    scalars = (x.transpose(1, 2)[..., None] for x in of_heads)
    return _Factors(rows.v[number].float().transpose(1, 2), *scalars)


def _invert(
    coupling: torch.Tensor, inverse: torch.Tensor, new: torch.Tensor, live: slice
) -> torch.Tensor:
    """T [P, Hv, 16, 16] of couplings A [.., 16, 16]; rows that are not new are there already.

    T_i = 1_i + sum_{j < i} A_ij T_j, j ascending, fp32: T is the inverse of 1 - A.
    """
    sums = torch.zeros_like(inverse)
    fresh = new[:, None, :, None]
    inverse = inverse.clone()
    for j in range(live.stop):
        row = torch.where(torch.arange(BLOCK_ROWS) == j, 1.0, sums[:, :, j])
        inverse[:, :, j] = torch.where(fresh[:, :, j], row, inverse[:, :, j])
        below = slice(max(j + 1, live.start), live.stop)
        sums[:, :, below] += coupling[:, :, below, j, None] * inverse[:, :, j, None]
    return inverse


def _below(weights: torch.Tensor, x: torch.Tensor, terms: int) -> torch.Tensor:
    """weights [P, H, 16, 16], lower triangular, times x [P, H, 16, D], by rows.

    A column of x that is not finite in a row is NaN in this row and those below it.
    """
    finite = torch.isfinite(x)
    total = _by_head(
        lambda left, right: product(left, right, terms, terms),
        weights,
        torch.where(finite, x, 0.0),
    )
    return torch.where(finite.logical_not().cumsum(2) > 0, torch.nan, total)


def _select(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """x [P, rows, ...] with zeros in rows that are not kept [P, rows]."""
    return torch.where(kept.view(*kept.shape, *[1] * (x.dim() - 2)), x, torch.zeros_like(x))


def _by_head(
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    left: torch.Tensor,
    right: torch.Tensor,
) -> torch.Tensor:
    """Products of [P, H, ...] as products of [P * H, ...]."""
    made = multiply(left.flatten(0, 1), right.flatten(0, 1))
    return made.view(*left.shape[:2], *made.shape[1:])
