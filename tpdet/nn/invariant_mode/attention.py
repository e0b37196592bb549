"""Attention of padded batches by the paged kernel of the contract, over what each row really sees.

`scaled_dot_product_attention` reads a mask, from which `plan_of` finds for each sequence the first
key that any of its rows sees: there its positions, splits and key tiles begin, so padding on either
side reaches no bit. Rows that see one key more than the row before are a *run*; rows that all see
the same keys (padding behind a sequence, a single new token, no mask at all) are a *level* run.
Rows of a sliding window are a run with that window. A row that sees other keys in one piece begins
at its own first key. Rows that see nothing give zeros.

    B, Q, K, H, Hkv, D   sequences, queries, keys, query heads, key heads, values of a head
    q [B, H, Q, D], k and v [B, Hkv, K, D] -> [B, H, Q, D], q's dtype

Backward, for each run of R rows and the N keys it sees, with c = fp32(1 / sqrt(D)), in fp32:

    P = softmax(c * q k^T)        dS = P * (do v^T - Σ do o)
    dq = c * dS k                 dk = c * dS^T q                 dv = P^T do

Products are column products, sums are in fixed point; a query head adds its runs, ascending. A key
head's gradient is `aten::sum` of its query heads' in the model's dtype: the bits of a model that
repeats keys for them, as transformers does where there is a mask and not where there is none.
"""

import math
import struct
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpdet.errors import UsageError
from tpdet.kernels import ops
from tpdet.kernels.exact.fixed_point import order_free_sum
from tpdet.kernels.inputs.paged_batch import PagedBatch, PagedSequence, make_batch
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.nn.invariant_mode.products import product
from tpdet.nn.invariant_mode.reductions import softmax, sum_of

_FIELDS = 7
_MOST_HEADS = 256  # rows of a product that a CPU's admission tries
_NAME = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Run:
    """Rows [first_row, first_row + count) of a sequence, which see keys from `first_key` on.

    Row i sees `length + i` keys, or `length` each where `level`; the last `window` of them alone if
    that is no 0.
    """

    sequence: int
    first_row: int
    count: int
    first_key: int
    length: int
    level: int
    window: int = 0

    @property
    def longest(self) -> int:
        """Keys that the last row sees."""
        return self.length if self.level else self.length + self.count - 1


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, differentiable.

    Raises UsageError for dropout, a scale other than 1 / sqrt(D), and masks by which a row sees
    keys with gaps, sees other keys than the heads beside it, or is biased.
    """
    _check(query, key, value, dropout_p, scale, enable_gqa)
    runs = plan_of(query, key, attn_mask, is_causal)
    numbers = [number for run in runs for number in astuple(run)]
    return torch.ops.tpdet_invariant.attention(query, key, value, numbers)


def plan_of(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Run, ...]:
    """The runs of a batch by its mask [.., Q, K]. Raises UsageError."""
    sequences, rows, keys = len(query), query.shape[2], key.shape[2]
    if mask is None:
        last = np.minimum(np.arange(rows), keys - 1) if is_causal else np.full(rows, keys - 1)
        runs = _runs_of(0, np.zeros(rows, int), last + 1)
        return tuple(replace(run, sequence=b) for b in range(sequences) for run in runs)
    if is_causal:
        raise UsageError(f"{_NAME} with a mask and is_causal: give one of them")
    first, end = _visible(mask, sequences, rows, keys)
    return tuple(run for b in range(sequences) for run in _runs_of(b, first[b], end[b]))


def _visible(mask: Tensor, sequences: int, rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """First key and end of what each row sees [B, Q]; end 0 of a row that sees none."""
    wide = mask.detach().cpu()
    wide = wide.view(*[1] * (4 - wide.ndim), *wide.shape)
    if wide.shape[1] > 1:
        if wide.stride(1) and not torch.equal(wide, wide[:, :1].expand(wide.shape)):
            raise UsageError(f"{_NAME}: the mask differs between heads: use one for all of them")
        wide = wide[:, :1]
    if wide.dtype != torch.bool:
        least = torch.finfo(wide.dtype).min
        if not bool(((wide == 0) | (wide <= least)).all()):
            raise UsageError(f"{_NAME}: the mask adds to scores: give a boolean mask")
        wide = wide == 0
    sees = wide.expand(sequences, 1, rows, keys)[:, 0].numpy()
    count = sees.sum(-1)
    first = sees.argmax(-1)
    end = np.where(count > 0, keys - sees[..., ::-1].argmax(-1), 0)
    if (np.where(count > 0, end - first, 0) != count).any():
        raise UsageError(f"{_NAME}: a row of the mask has gaps: leave tpdet.nn.invariant()")
    return first, end


def _runs_of(sequence: int, first: np.ndarray, end: np.ndarray) -> list[Run]:
    """The runs of a sequence whose row i sees the keys [first[i], end[i]), none if end[i] is 0."""
    seen = end > 0
    start = first[seen].min(initial=np.iinfo(first.dtype).max)
    cut = seen & (first > start)
    window = int((end - first)[cut].max(initial=0))
    if (end - start)[seen & ~cut].max(initial=0) > window:
        window = 0  # a row sees more: what cuts the others is no window
    alone = cut & (first != end - window)
    starts = np.where(alone, first, start).tolist()
    windows, ends = np.where(alone, 0, window).tolist(), end.tolist()
    runs: list[Run] = []
    row = 0
    while row < len(ends):
        kind, stop = (starts[row], windows[row]), row + 1
        step = int(stop < len(ends) and ends[stop] == ends[row] + 1)
        while (
            stop < len(ends)
            and ends[stop] == ends[stop - 1] + step
            and (starts[stop], windows[stop]) == kind
        ):
            stop += 1
        if ends[row]:
            length, level = ends[row] - kind[0], int(not step or stop == row + 1)
            runs.append(Run(sequence, row, stop - row, kind[0], length, level, kind[1]))
        row = stop
    return runs


def _check(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None, grouped: bool
) -> None:
    if dropout:
        raise UsageError(f"{_NAME} with dropout {dropout}: call model.eval() or set it to 0")
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if query.ndim != 4 or key.shape != value.shape or query.shape[3] != key.shape[3]:
        raise UsageError(f"{_NAME} of {shapes}: give [B, H, Q, D] and twice [B, Hkv, K, D]")
    heads, key_heads = query.shape[1], key.shape[1]
    if len(query) != len(key) or heads % key_heads or (heads != key_heads and not grouped):
        raise UsageError(f"{_NAME} of {shapes}: heads or sequences do not fit")
    head = query.shape[3]
    if scale is not None and _single(scale) != _single(1.0 / math.sqrt(head)):
        raise UsageError(f"{_NAME} with scale {scale}: heads of {head} have 1 / sqrt({head})")


def _single(number: float) -> bytes:
    return struct.pack("f", number)


@torch.library.custom_op("tpdet_invariant::attention", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, runs: list[int]) -> Tensor:
    """Attention of the rows of `runs`, seven numbers each (`Run`); other rows are zeros."""
    plan = _read(runs)
    out = query.new_zeros(query.shape)
    if not plan:
        return out
    pages = _paged(key, value, plan)
    packed: dict[int, list[Run]] = {}
    for run in plan:
        if run.level and run.count > 1 and query.device.type == "cpu":
            here = (run.sequence, slice(None), slice(run.first_row, run.first_row + run.count))
            out[here] = _attend_level(query[here], pages, run)
        else:
            packed.setdefault(run.window, []).append(run)
    for window, members in packed.items():
        rows = torch.cat([torch.arange(r.first_row, r.first_row + r.count) for r in members])
        counts = torch.tensor([run.count for run in members])
        sequence = torch.tensor([run.sequence for run in members]).repeat_interleave(counts)
        rows, sequence = rows.to(query.device), sequence.to(query.device)
        batch = _batch(members, pages.tables, query.device)
        tokens = query[sequence, :, rows].contiguous()
        y = ops.paged_attention(tokens, pages.keys, pages.values, batch, window or None)
        out[sequence, :, rows] = y
    return out


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, runs: list[int]) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _attend_level(query: Tensor, pages: "_Pages", run: Run) -> Tensor:
    """Rows that see the same keys as heads of one row: query [H, R, D] -> [H, R, D]."""
    group = len(query) // pages.keys.shape[1]
    table = pages.tables[run.sequence, run.first_key]
    batch = make_batch((PagedSequence(0, 1, run.length - 1, table),))
    parts = []
    for part in query.split(max(1, _MOST_HEADS // group), dim=1):
        heads = part.reshape(1, -1, part.shape[2])
        y = ops.paged_attention(heads, pages.keys, pages.values, batch, run.window or None)
        parts.append(y.view(part.shape))
    return torch.cat(parts, dim=1)


@torch.library.custom_op("tpdet_invariant::attention_backward", mutates_args=())
def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, runs: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, in their dtypes."""
    heads, key_heads = query.shape[1], key.shape[1]
    group = heads // key_heads
    each = (len(key), heads, *key.shape[2:])
    dq, dk, dv = (query.new_zeros(x, dtype=torch.float32) for x in (query.shape, each, each))
    for run in _read(runs):
        rows = slice(run.first_row, run.first_row + run.count)
        keys = slice(run.first_key, run.first_key + run.longest)
        seen = _seen(run, query.device)
        for head in range(heads):
            here, there = (run.sequence, head, rows), (run.sequence, head, keys)
            do, q, o = (x[here].float() for x in (grad, query, output))
            k, v = (x[run.sequence, head // group, keys].float() for x in (key, value))
            gradients = _head_gradients(do, q, o, k, v, seen)
            dq[here] = gradients[0]
            dk[there] += gradients[1]
            dv[there] += gradients[2]
    return dq.to(query.dtype), _of_key_heads(dk, key), _of_key_heads(dv, value)


def _of_key_heads(each: Tensor, key: Tensor) -> Tensor:
    """Gradients of query heads [B, H, K, D] in fp32 -> of the heads of `key`, in its dtype."""
    narrow = (each + 0.0).to(key.dtype)
    grouped = narrow.view(len(key), key.shape[1], -1, *key.shape[2:])
    return narrow if grouped.shape[2] == 1 else sum_of(grouped, [2])


@attend_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, runs: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    laid = torch.contiguous_format
    return (
        torch.empty_like(query, memory_format=laid),
        torch.empty_like(key, memory_format=laid),
        torch.empty_like(value, memory_format=laid),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, ctx.runs = inputs
    ctx.save_for_backward(query, key, value, output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    backward = torch.ops.tpdet_invariant.attention_backward
    return *backward(grad, *ctx.saved_tensors, ctx.runs), None


attend.register_autograd(_differentiate, setup_context=_keep)


def _head_gradients(
    grad: Tensor, query: Tensor, output: Tensor, key: Tensor, value: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A head's gradients: fp32 rows [R, D], keys [N, D], seen [R, N] -> dq, dk and dv in fp32."""
    scale = torch.tensor(1.0 / math.sqrt(query.shape[1]), dtype=torch.float32).item()
    score = torch.where(seen, product(query, key) * scale, -torch.inf)
    weight = softmax(score, 1, False)
    overlap = order_free_sum(grad * output, [1]).float()
    slope = torch.where(seen, weight * (product(grad, value) - overlap), 0.0)
    return (
        product(slope, key.t()) * scale,
        product(slope.t(), query.t()) * scale,
        product(weight.t(), grad.t()),
    )


def _seen(run: Run, device: torch.device) -> Tensor:
    """Which keys [N] each row [R] of a run sees."""
    steps = torch.arange(run.count, device=device) * (0 if run.level else 1)
    end = (steps + run.length)[:, None]
    number = torch.arange(run.longest, device=device)
    seen = number < end
    return seen & (number >= end - run.window) if run.window else seen


def _read(numbers: list[int]) -> list[Run]:
    return [Run(*numbers[i : i + _FIELDS]) for i in range(0, len(numbers), _FIELDS)]


class _Pages(NamedTuple):
    """Keys and values as pages [P, Hkv, 256, D], and whose they are: by sequence and first key."""

    keys: Tensor
    values: Tensor
    tables: dict[tuple[int, int], tuple[int, ...]]


def _paged(key: Tensor, value: Tensor, plan: list[Run]) -> _Pages:
    """Pages of what runs see, from the first key of each on."""
    lengths: dict[tuple[int, int], int] = {}
    for run in plan:
        name = (run.sequence, run.first_key)
        lengths[name] = max(run.longest, lengths.get(name, 0))
    tables: dict[tuple[int, int], tuple[int, ...]] = {}
    count = 0
    for name, length in lengths.items():
        tables[name] = tuple(range(count, count - (-length // PAGE_TOKENS)))
        count = tables[name][-1] + 1
    heads, head = key.shape[1], key.shape[3]
    pools = [x.new_zeros(count, heads, PAGE_TOKENS, head) for x in (key, value)]
    for pool, x in zip(pools, (key, value), strict=True):
        for (sequence, first), length in lengths.items():
            table = tables[sequence, first]
            rows = x.new_zeros(heads, len(table) * PAGE_TOKENS, head)
            rows[:, :length] = x[sequence, :, first : first + length]
            laid = rows.view(heads, len(table), PAGE_TOKENS, head).transpose(0, 1)
            pool[table[0] : table[-1] + 1] = laid
    return _Pages(pools[0], pools[1], tables)


def _batch(
    plan: list[Run], tables: dict[tuple[int, int], tuple[int, ...]], device: torch.device
) -> PagedBatch:
    """The batch of the packed rows; a level run's rows are sequences of their own."""
    sequences: list[PagedSequence] = []
    row = 0
    for run in plan:
        table, start = tables[run.sequence, run.first_key], run.length - 1
        parts = [1] * run.count if run.level else [run.count]
        for count in parts:
            sequences.append(PagedSequence(row, count, start, table))
            row += count
    return make_batch(tuple(sequences), device)
