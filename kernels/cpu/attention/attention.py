"""Paged attention by fixed 256-position splits: one definition for prefill, chunk and decode.

Keys are cut at absolute positions 0, 256, 512, ...; a split is four 64-key tiles of online softmax
(Milakov and Gimelshein 2018, arXiv 1805.02867) from a fresh state, and splits merge in ascending
order, so a row's bits depend on its own keys alone:

    s = (q . k) * c,  c = fp32(1 / sqrt(D)), soft-capped in some models     masked keys: -1e30
    m' = max(m, max s);  a = exp(m - m');  p = round(exp(s - m'))          (masked: p = 0)
    l' = l * a + sum p;  o' = o * a + p . v;         y = round(o / l + 0.0)

`sum p` halves 64 columns six times (element i adds element i + width / 2). A split with no key that
a row may see leaves that row's state as it is (by select). A head's sink, in models that have them,
is the state before its first split: m = the sink, l = 1, o = 0. Rows stand in groups of 16, padded
with zeros; keys past a sequence's length are masked by select whatever they hold. A window of W
keeps keys in (position - W, position]. `+ 0.0` makes the sign of an exact zero positive.
"""

import math
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.functional import pad

from tpdet.kernels.cpu import threads
from tpdet.kernels.cpu.pointwise.soft_cap import soft_cap
from tpdet.kernels.exact.fp8_rows import decode_rows, rows_of
from tpdet.kernels.inputs.paged_batch import PagedBatch, PagedSequence
from tpdet.kernels.order import K_GROUP, MASKED, PAGE_TOKENS, TILE_TOKENS

_ROW_GROUP = 16
_MAX_ROWS = 256  # rows of one prefill block, at most
_MAX_BATCH = 32  # single-group blocks computed side by side, at most


@dataclass(frozen=True)
class _Block:
    """Rows of one sequence that are computed together: tokens [first, first + count) of it."""

    sequence: PagedSequence
    first: int
    count: int
    groups: int


@dataclass(frozen=True)
class _StoredPages:
    """Pages of keys and values, which stand for numbers of `dtype` in heads of `head`."""

    keys: torch.Tensor
    values: torch.Tensor
    dtype: torch.dtype
    head: int

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, Hkv, 256, D] fp32 of pages [B]."""
        keys, values = self.keys[pages], self.values[pages]
        if keys.dtype == torch.uint8:
            keys = decode_rows(*rows_of(keys, self.head), self.dtype)
            values = decode_rows(*rows_of(values, self.head), self.dtype)
        return keys.float(), values.float()


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [M, Hq, D] over pages [P, Hkv, 256, D] -> [M, Hq, D], q's dtype.

    Pages of uint8 [P, Hkv, 256 * (D + 1)] hold keys and values in fp8 (`exact/fp8_rows.py`).
    Query head h reads key head h // (Hq / Hkv). Keys and values of this step's rows are already
    stored. sinks: fp32 [Hq], or None. Rows that no sequence names come back as zeros.
    """
    out = torch.zeros_like(q)
    per_key_head = q.shape[1] // k_pages.shape[1]
    blocks = [b for sequence in batch.sequences for b in _blocks(sequence, per_key_head)]
    batches: list[list[_Block]] = []
    for groups, same in groupby(sorted(blocks, key=lambda b: b.groups), key=lambda b: b.groups):
        members = list(same)
        size = _MAX_BATCH if groups == 1 else 1
        batches += [members[i : i + size] for i in range(0, len(members), size)]
    threads.run_pieces(
        len(batches),
        lambda index: _attend(q, k_pages, v_pages, batches[index], window, cap, sinks, out),
        costly=True,
    )
    return out


def _blocks(sequence: PagedSequence, per_key_head: int) -> list[_Block]:
    tokens = max(1, _MAX_ROWS // per_key_head)
    cuts = range(0, sequence.count, tokens)
    counts = [min(tokens, sequence.count - first) for first in cuts]
    return [
        _Block(sequence, first, count, -(-count * per_key_head // _ROW_GROUP))
        for first, count in zip(cuts, counts, strict=True)
    ]


def _attend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    blocks: list[_Block],
    window: int | None,
    cap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Compute blocks of one height together and write their rows of `out`."""
    key_heads, head = k_pages.shape[1], q.shape[2]
    per_key_head = q.shape[1] // key_heads
    rows = blocks[0].groups * _ROW_GROUP
    query = torch.zeros(len(blocks), key_heads, rows, head)
    position = torch.full((len(blocks), rows), -1)
    for i, block in enumerate(blocks):
        live = block.count * per_key_head
        first = block.sequence.first_row + block.first
        tokens = q[first : first + block.count].view(block.count, key_heads, per_key_head, head)
        query[i, :, :live] = tokens.permute(1, 0, 2, 3).reshape(key_heads, live, head)
        start = block.sequence.start + block.first
        position[i, :live] = torch.arange(start, start + block.count).repeat_interleave(
            per_key_head
        )
    sink = None
    if sinks is not None:
        sink = sinks.view(key_heads, per_key_head)[:, torch.arange(rows) % per_key_head]
    read = _StoredPages(k_pages, v_pages, q.dtype, head)
    result = _attend_splits(query, position, read, blocks, window, cap, sink)
    for i, block in enumerate(blocks):
        live = block.count * per_key_head
        first = block.sequence.first_row + block.first
        heads = result[i, :, :live].reshape(key_heads, block.count, per_key_head, head)
        out[first : first + block.count] = heads.permute(1, 0, 2, 3).reshape(
            block.count, key_heads * per_key_head, head
        )


def _attend_splits(
    query: torch.Tensor,
    position: torch.Tensor,
    stored_pages: "_StoredPages",
    blocks: list[_Block],
    window: int | None,
    cap: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """query [B, Hkv, R, D] fp32, position [B, R] (-1: pad) -> [B, Hkv, R, D], the model's dtype.

    sink: fp32 [Hkv, R], the state before any key; None for none.
    """
    shape = query.shape[:3]
    largest = torch.full(shape, MASKED) if sink is None else sink.repeat(len(blocks), 1, 1)
    mass = torch.full(shape, 0.0 if sink is None else 1.0)
    total = torch.zeros(query.shape)
    ends = [-(-(b.sequence.start + b.first + b.count) // PAGE_TOKENS) for b in blocks]
    lows = [b.sequence.start + b.first for b in blocks]
    begins = [0 if window is None else max(0, low - window + 1) // PAGE_TOKENS for low in lows]
    for split in range(min(begins), max(ends)):
        index = [i for i in range(len(blocks)) if begins[i] <= split < ends[i]]
        if not index:  # past the end of the short ones and behind the windows of the long ones
            continue
        pages = torch.tensor([blocks[i].sequence.pages[split] for i in index])
        lengths = [blocks[i].sequence.length for i in index]
        at: slice | torch.Tensor = slice(None) if len(index) == len(blocks) else torch.tensor(index)
        first = split * PAGE_TOKENS
        key = torch.arange(first, first + PAGE_TOKENS)
        seen = key <= position[at][:, :, None]
        if window is not None:
            seen &= key > position[at][:, :, None] - window
        keys, values = stored_pages.read(pages)
        if min(lengths) < first + PAGE_TOKENS:
            stored = key < torch.tensor(lengths)[:, None]
            values = torch.where(stored[:, None, :, None], values, 0.0)
        # Behind the last key all weights and values are 0: those tiles would add 0.
        count = min(max(lengths) - first, PAGE_TOKENS)
        state = _split_state(query[at], keys, values, seen, stored_pages.dtype, cap, count)
        merged = _merge((largest[at], mass[at], total[at]), state)
        visible = seen.any(-1)[:, None, :]
        largest[at] = torch.where(visible, merged[0], largest[at])
        mass[at] = torch.where(visible, merged[1], mass[at])
        total[at] = torch.where(visible[..., None], merged[2], total[at])
    mass = torch.where(position[:, None, :] < 0, 1.0, mass)
    return (total * (1.0 / mass)[..., None] + 0.0).to(stored_pages.dtype)


_State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _split_state(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    dtype: torch.dtype,
    cap: float,
    count: int,
) -> _State:
    """One split from a fresh state: query [B, Hkv, R, D], keys and values [B, Hkv, 256, D] fp32.

    seen [B, R, 256], and nothing from `count` on. Returns largest score and mass [B, Hkv, R] and
    weighted values [B, Hkv, R, D].
    """
    scale = torch.tensor(1.0 / math.sqrt(query.shape[3]), dtype=torch.float32)
    size, zeros = query.shape[3], -query.shape[3] % K_GROUP
    if zeros:  # for heads of 10 values the BLAS has other bits for other numbers of rows
        query, keys, values = (pad(x, (0, zeros)) for x in (query, keys, values))
    batch, heads, rows, head = query.shape
    flat = query.view(batch * heads, rows, head)
    score = torch.bmm(flat, keys.view(batch * heads, PAGE_TOKENS, head).transpose(1, 2)) * scale
    if cap:
        score = soft_cap(score, cap)
    score = torch.where(seen[:, None], score.view(batch, heads, rows, PAGE_TOKENS), MASKED)
    largest = torch.full((batch, heads, rows), MASKED)
    mass = torch.zeros(batch, heads, rows)
    total = torch.zeros(batch * heads, rows, head)
    for first in range(0, count, TILE_TOKENS):
        tile = slice(first, first + TILE_TOKENS)
        raised = torch.maximum(largest, score[..., tile].amax(-1))
        shrink = torch.exp(largest - raised)
        weight = torch.exp(score[..., tile] - raised[..., None])
        weight = torch.where(seen[:, None, :, tile], weight, 0.0).to(dtype).float()
        value = values[:, :, tile].reshape(batch * heads, TILE_TOKENS, head)
        product = torch.bmm(weight.view(batch * heads, rows, TILE_TOKENS), value)
        total = total * shrink.view(batch * heads, rows, 1) + product
        mass = mass * shrink + _row_sum(weight)
        largest = raised
    return largest, mass, total.view(batch, heads, rows, head)[..., :size]


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the last dimension (a power of two) by halving: one fixed tree an element."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _merge(left: _State, right: _State) -> _State:
    """Two states of disjoint keys, the earlier first."""
    raised = torch.maximum(left[0], right[0])
    a, b = torch.exp(left[0] - raised), torch.exp(right[0] - raised)
    return (raised, left[1] * a + right[1] * b, left[2] * a[..., None] + right[2] * b[..., None])
