"""BLAKE3 of tensors on a GPU: the digests that the CPU's library has of the same bytes.

BLAKE3 cuts its input into chunks of 1,024 bytes, which no other is needed for: a thread has a
chunk, and goes through its 16 blocks of 64 bytes. Then neighbours are joined, level by level, the
last of an odd number going up as it is, until one node is left.

A state and a block are tuples of 16 words of 32 bits; a word has a value for each thread.

Messages lie side by side, each from a chunk's first byte on. What a thread must know of its message
it reads from a table with a column for each: the host makes no list that is as long as the chunks.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.sizes import cdiv

CHUNK_BYTES = 1024
WINDOW_BYTES = 128 << 20
"""Chunks of about so many bytes are laid side by side at a time."""
_THREADS = 128
_WORDS = 8  # of a node's value


@triton.jit
def _rotated(x, bits: tl.constexpr):
    return (x >> bits) | (x << (32 - bits))


@triton.jit
def _mixed(v, m, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """The words a, b, c, d of a state after two words of a block were mixed in."""
    va = v[a] + v[b] + m[0]
    vd = _rotated(v[d] ^ va, 16)
    vc = v[c] + vd
    vb = _rotated(v[b] ^ vc, 12)
    va = va + vb + m[1]
    vd = _rotated(vd ^ va, 8)
    vc = vc + vd
    return va, _rotated(vb ^ vc, 7), vc, vd


@triton.jit
def _round(v, m):
    """A state after one round: its columns are mixed, then its diagonals."""
    a0, b0, c0, d0 = _mixed(v, (m[0], m[1]), 0, 4, 8, 12)
    a1, b1, c1, d1 = _mixed(v, (m[2], m[3]), 1, 5, 9, 13)
    a2, b2, c2, d2 = _mixed(v, (m[4], m[5]), 2, 6, 10, 14)
    a3, b3, c3, d3 = _mixed(v, (m[6], m[7]), 3, 7, 11, 15)
    v = (a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3)
    a0, b1, c2, d3 = _mixed(v, (m[8], m[9]), 0, 5, 10, 15)
    a1, b2, c3, d0 = _mixed(v, (m[10], m[11]), 1, 6, 11, 12)
    a2, b3, c0, d1 = _mixed(v, (m[12], m[13]), 2, 7, 8, 13)
    a3, b0, c1, d2 = _mixed(v, (m[14], m[15]), 3, 4, 9, 14)
    return (a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3)


@triton.jit
def _first_words(like):
    """BLAKE3's eight words of initialization, for as many threads as `like` has values."""
    zero = (like ^ like).to(tl.uint32)
    return (
        zero + 0x6A09E667,
        zero + 0xBB67AE85,
        zero + 0x3C6EF372,
        zero + 0xA54FF53A,
        zero + 0x510E527F,
        zero + 0x9B05688C,
        zero + 0x1F83D9AB,
        zero + 0x5BE0CD19,
    )


@triton.jit
def _compressed(h, m, counter, length, flags):
    """The eight words that `h` becomes with a block m."""
    first = _first_words(counter)
    zero = (counter ^ counter).to(tl.uint32)
    v = (
        h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7],
        first[0], first[1], first[2], first[3], counter, zero, length, flags,
    )  # fmt: skip
    for number in tl.static_range(7):
        v = _round(v, m)
        if number < 6:
            m = (
                m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13],
                m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8],
            )  # fmt: skip
    return (
        v[0] ^ v[8],
        v[1] ^ v[9],
        v[2] ^ v[10],
        v[3] ^ v[11],
        v[4] ^ v[12],
        v[5] ^ v[13],
        v[6] ^ v[14],
        v[7] ^ v[15],
    )


@triton.jit
def _loaded(words, mask):
    """Eight words that follow each other, for each thread."""
    return (
        tl.load(words, mask=mask, other=0).to(tl.uint32),
        tl.load(words + 1, mask=mask, other=0).to(tl.uint32),
        tl.load(words + 2, mask=mask, other=0).to(tl.uint32),
        tl.load(words + 3, mask=mask, other=0).to(tl.uint32),
        tl.load(words + 4, mask=mask, other=0).to(tl.uint32),
        tl.load(words + 5, mask=mask, other=0).to(tl.uint32),
        tl.load(words + 6, mask=mask, other=0).to(tl.uint32),
        tl.load(words + 7, mask=mask, other=0).to(tl.uint32),
    )


@triton.jit
def _stored(words, h, mask):
    tl.store(words, h[0].to(tl.int32), mask=mask)
    tl.store(words + 1, h[1].to(tl.int32), mask=mask)
    tl.store(words + 2, h[2].to(tl.int32), mask=mask)
    tl.store(words + 3, h[3].to(tl.int32), mask=mask)
    tl.store(words + 4, h[4].to(tl.int32), mask=mask)
    tl.store(words + 5, h[5].to(tl.int32), mask=mask)
    tl.store(words + 6, h[6].to(tl.int32), mask=mask)
    tl.store(words + 7, h[7].to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["first", "stop", "columns"])
def hash_chunks(words, messages, table, nodes, first, stop, columns, BLOCK: tl.constexpr):
    """nodes[i] = the value of chunk i of `first` to `stop`: 256 words of message `messages[i]`.

    words: of these chunks alone.
    table: int32 [1 + 2 * levels, columns], a column for each message: the bytes of its last chunk,
    then for every level, chunks first, its first node and the number of its nodes.
    """
    chunk = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = chunk < stop
    message = tl.load(messages + chunk, mask=there, other=0)
    last_bytes = tl.load(table + message, mask=there, other=0)
    counter = chunk - tl.load(table + columns + message, mask=there, other=0)
    count = tl.load(table + 2 * columns + message, mask=there, other=1)
    length = tl.where(counter == count - 1, last_bytes, 1024)
    root = tl.where(count == 1, 8, 0)
    last = tl.maximum(length - 1, 0) // 64
    start = words + (chunk - first).to(tl.int64) * 256
    h0, h1, h2, h3, h4, h5, h6, h7 = _first_words(counter)
    for block in range(16):
        low = _loaded(start + block * 16, there)
        high = _loaded(start + block * 16 + 8, there)
        m = (
            low[0], low[1], low[2], low[3], low[4], low[5], low[6], low[7],
            high[0], high[1], high[2], high[3], high[4], high[5], high[6], high[7],
        )  # fmt: skip
        size = tl.minimum(tl.maximum(length - block * 64, 0), 64).to(tl.uint32)
        end = block == last
        flags = tl.where(end, 2 | root, 0) | tl.where(block == 0, 1, 0)
        h = (h0, h1, h2, h3, h4, h5, h6, h7)
        g = _compressed(h, m, counter.to(tl.uint32), size, flags.to(tl.uint32))
        runs = block <= last
        h0, h1 = tl.where(runs, g[0], h0), tl.where(runs, g[1], h1)
        h2, h3 = tl.where(runs, g[2], h2), tl.where(runs, g[3], h3)
        h4, h5 = tl.where(runs, g[4], h4), tl.where(runs, g[5], h5)
        h6, h7 = tl.where(runs, g[6], h6), tl.where(runs, g[7], h7)
    _stored(nodes + chunk * 8, (h0, h1, h2, h3, h4, h5, h6, h7), there)


@triton.jit(do_not_specialize=["level", "count", "columns"])
def join_nodes(
    nodes, messages, table, joined, joined_messages, level, count, columns, BLOCK: tl.constexpr
):
    """joined = the parents of the nodes of a level, two by two; a last one alone goes up as it is.

    messages, joined_messages: whose node each is. table: as `hash_chunks` has it.
    """
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = node < count
    message = tl.load(messages + node, mask=there, other=0)
    rows = table + (1 + 2 * level) * columns + message
    number = node - tl.load(rows, mask=there, other=0)
    of_message = tl.load(rows + columns, mask=there, other=0)
    left = there & (number % 2 == 0)
    both = left & (number + 1 < of_message)
    root = tl.where(of_message == 2, 8, 0)
    low = _loaded(nodes + node * 8, left)
    high = _loaded(nodes + node * 8 + 8, both)
    m = (
        low[0], low[1], low[2], low[3], low[4], low[5], low[6], low[7],
        high[0], high[1], high[2], high[3], high[4], high[5], high[6], high[7],
    )  # fmt: skip
    zero = (node ^ node).to(tl.uint32)
    g = _compressed(_first_words(zero), m, zero, zero + 64, (root | 4).to(tl.uint32))
    h = (
        tl.where(both, g[0], low[0]), tl.where(both, g[1], low[1]),
        tl.where(both, g[2], low[2]), tl.where(both, g[3], low[3]),
        tl.where(both, g[4], low[4]), tl.where(both, g[5], low[5]),
        tl.where(both, g[6], low[6]), tl.where(both, g[7], low[7]),
    )  # fmt: skip
    parent = tl.load(rows + 2 * columns, mask=left, other=0) + number // 2
    _stored(joined + parent * 8, h, left)
    tl.store(joined_messages + parent, message, mask=left)


def blake3_of(headers: Sequence[bytes], parts: Sequence[torch.Tensor]) -> list[bytes]:
    """BLAKE3 of each header followed by the bytes of a tensor, row-major; all on one device.

    Takes WINDOW_BYTES, 3 % of the tensors' bytes, and a copy of those that are not contiguous;
    waits for the GPU once.
    """
    if not parts:
        return []
    sizes = np.array([len(h) + p.nbytes for h, p in zip(headers, parts, strict=True)], np.int64)
    counts = np.maximum(-(-sizes // CHUNK_BYTES), 1)
    levels = _levels(counts)
    device, columns, chunks = parts[0].device, len(parts), int(counts.sum())
    rows = np.concatenate([[sizes - (counts - 1) * CHUNK_BYTES], *levels])
    table = torch.from_numpy(rows.astype(np.int32)).to(device)
    messages = torch.repeat_interleave(table[2], output_size=chunks).int()
    nodes = torch.empty(chunks, _WORDS, dtype=torch.int32, device=device)
    sizing = {"BLOCK": _THREADS, "num_warps": _THREADS // 32}
    side_by_side = _SideBySide(headers, parts, levels[0][0] * CHUNK_BYTES)
    for first in range(0, chunks, WINDOW_BYTES // CHUNK_BYTES):
        end = min(first + WINDOW_BYTES // CHUNK_BYTES, chunks)
        words, grid = side_by_side.words(first, end), (cdiv(end - first, _THREADS),)
        hash_chunks[grid](words, messages, table, nodes, first, end, columns, **sizing)
    for level, (_, parents) in enumerate(levels[1:]):
        count, grid = len(nodes), (cdiv(len(nodes), _THREADS),)
        joined = torch.empty(int(parents.sum()), _WORDS, dtype=torch.int32, device=device)
        whose = torch.empty(len(joined), dtype=torch.int32, device=device)
        join_nodes[grid](nodes, messages, table, joined, whose, level, count, columns, **sizing)
        nodes, messages = joined, whose
    return [row.tobytes() for row in nodes.cpu().numpy()]


def _levels(counts: np.ndarray) -> list[np.ndarray]:
    """Each message has a first node and a number of nodes: [2, messages], level by level."""
    levels = [np.stack([np.cumsum(counts) - counts, counts])]
    while counts.max() > 1:
        counts = -(-counts // 2)
        levels.append(np.stack([np.cumsum(counts) - counts, counts]))
    return levels


class _SideBySide:
    """Messages that begin at these places of one row of bytes; zeros are between them."""

    def __init__(
        self, headers: Sequence[bytes], parts: Sequence[torch.Tensor], begins: np.ndarray
    ) -> None:
        self._device = parts[0].device
        places = [begin + np.arange(len(h)) for begin, h in zip(begins, headers, strict=True)]
        self._places = np.concatenate(places)
        self._letters = np.frombuffer(b"".join(headers), np.uint8)
        self._raw = [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]
        starts = zip(begins.tolist(), headers, strict=True)
        self._starts = [begin + len(header) for begin, header in starts]

    def words(self, first: int, end: int) -> torch.Tensor:
        """Chunks `first` to `end` of the row: int32 [(end - first) * 256]."""
        low, high = first * CHUNK_BYTES, end * CHUNK_BYTES
        joined = torch.zeros(high - low, dtype=torch.uint8, device=self._device)
        here = (self._places >= low) & (self._places < high)
        if here.any():
            places = torch.from_numpy(self._places[here] - low).to(self._device)
            joined[places] = torch.from_numpy(self._letters[here]).to(self._device)
        for start, raw in zip(self._starts, self._raw, strict=True):
            part = raw[max(low - start, 0) : max(high - start, 0)]
            if len(part):
                place = max(start - low, 0)
                joined[place : place + len(part)] = part
        return joined.view(torch.int32)
