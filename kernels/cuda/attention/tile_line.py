"""How the splits of short sequences are dealt out to programs that stay: in equal numbers of tiles.

    rows     [S, 3] int32: a sequence's first row of q, its tokens in the step, its first position
    item     a sequence and a key head
    pair     a sequence and a split of it, of any key head
    unit     a split of a sequence, counted by key head, then split

All tiles of sequences with 1 to `short_rows` tokens stand in one line: by sequence, key head,
split. The line is cut into parts of one length, one a program. A split belongs to the part that has
its first tile; where items are short beside a part, an item does.

Triton 3.6 drops a value that nested loops carry and that bounds a loop inside them. So what a
sequence has in a part follows from the sequence's number alone.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpdet.kernels.cuda.attention.split import TILE, TILES

_THREADS = gl.constexpr(32)  # of a warp, which looks at all sequences
_WHOLE = gl.constexpr(4)  # items that fill a part at least, if items are not cut
_BEHIND = gl.constexpr(1 << 30)  # more tiles than there are


class TileCut(NamedTuple):
    """A cut of the line: before `unit` of `sequence`; pairs: those of all sequences before it."""

    sequence: Any
    unit: Any
    pairs: Any


class TileLine(NamedTuple):
    """The sequences, and the two cuts between which a program's part lies."""

    rows: Any
    sequences: Any
    short_rows: Any
    begin: TileCut
    end: TileCut


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _cut(tile, part, ends, tiles, KEY_HEADS: gl.constexpr):
    """The cut at a tile of the line; ends: sums of `tiles` of a key head up to each sequence."""
    # 1. the sequence
    before = ends * KEY_HEADS <= tile
    sequence = gl.sum(before.to(gl.int32), 0)
    pairs = gl.sum(gl.where(before, gl.cdiv(tiles, TILES), 0), 0)
    tiles_before = gl.sum(gl.where(before, tiles, 0), 0)
    own = gl.min(gl.where(before, _BEHIND, ends), 0) - tiles_before
    # 2. the key head, and the first split that begins at the tile or behind it
    splits = gl.cdiv(own, TILES)
    rest = tile - tiles_before * KEY_HEADS
    head = rest // own
    rest -= head * own
    whole = own * _WHOLE <= part
    split = gl.where(whole, gl.minimum(rest, 1) * splits, gl.cdiv(rest, TILES))
    return TileCut(sequence, head * splits + split, pairs)


@gluon.jit
def tile_line(rows, sequences, short_rows, KEY_HEADS: gl.constexpr, LISTED: gl.constexpr):
    """The line with this program's part; LISTED: a power of two, `sequences` at least."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([LISTED // _THREADS], [_THREADS], [4], [0])
    index = gl.arange(0, LISTED, layout=LAYOUT)  # every warp has all: no sum crosses warps
    there = index < sequences
    count = gl.load(rows + (index * 3 + 1), mask=there, other=0)
    start = gl.load(rows + (index * 3 + 2), mask=there, other=0)
    short = (count > 0) & (count <= short_rows)
    tiles = gl.where(short, gl.cdiv(start + count, TILE), 0)
    ends = gl.associative_scan(tiles, 0, _sum)
    part = gl.cdiv(gl.max(ends, 0) * KEY_HEADS, gl.num_programs(0))
    first = gl.program_id(0) * part
    begin = _cut(first, part, ends, tiles, KEY_HEADS)
    end = _cut(first + part, part, ends, tiles, KEY_HEADS)
    return TileLine(rows, sequences, short_rows, begin, end)


@gluon.jit
def end_sequence(line):
    """The number behind the last sequence that the part has anything of."""
    return gl.minimum(line.end.sequence + 1, line.sequences)


@gluon.jit
def sequence_of(line, sequence, KEY_HEADS: gl.constexpr):
    """A sequence's first row, tokens, first position, splits; units [begin, end) in the part."""
    first_row = gl.load(line.rows + sequence * 3)
    count = gl.load(line.rows + (sequence * 3 + 1))
    start = gl.load(line.rows + (sequence * 3 + 2))
    short = (count > 0) & (count <= line.short_rows)
    splits = gl.where(short, gl.cdiv(start + count, TILE * TILES), 0)
    begin = gl.where(sequence == line.begin.sequence, line.begin.unit, 0)
    end = gl.where(sequence == line.end.sequence, line.end.unit, KEY_HEADS * splits)
    return first_row, count, start, splits, begin, end
