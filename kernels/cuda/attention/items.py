"""How the rows of long sequences are dealt out to programs that stay for many of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpdet.kernels.cuda.attention.split import TILE, TILES
from tpdet.kernels.cuda.attention.whole_split import GROUP_ROWS


@gluon.jit
def item_of(
    turn,
    items,
    blocks,
    rows,
    window,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """What a program does in its turn: 128 rows of a key head, on tiles [begin, end).

    Items come with the most keys first; every second turn runs the other way, so that programs
    get about as much. None are left where `end` is 0. All rows see all keys before tile `whole`,
    and splits before tile `rest` are taken whole.
    """
    PARTS: gl.constexpr = BLOCK * GROUP // (2 * GROUP_ROWS)
    across = gl.num_programs(0)
    place = gl.program_id(0)
    item = turn * across + place + turn % 2 * (across - 1 - 2 * place)
    within = gl.minimum(item, items - 1)
    head = within % KEY_HEADS
    work = within // KEY_HEADS
    part = PARTS - 1 - work % PARTS
    sequence = gl.load(blocks + work // PARTS * 2)
    first = gl.load(blocks + work // PARTS * 2 + 1)
    first_row = gl.load(rows + sequence * 3)
    count = gl.load(rows + sequence * 3 + 1)
    start = gl.load(rows + sequence * 3 + 2)
    row = part * (2 * GROUP_ROWS)
    low = first + row // GROUP
    high = gl.minimum(first + (row + 2 * GROUP_ROWS - 1) // GROUP, count - 1)
    end = gl.where((item < items) & (low < count), (start + high) // TILE + 1, 0)
    begin = 0
    whole = (start + low + 1) // TILE
    rest = gl.minimum(whole, end - 1) // TILES * TILES
    if WINDOW:
        begin = gl.maximum(start + low - window + 1, 0) // TILE
        whole = begin
        rest = begin
    return sequence, head, row, first, first_row, count, start, begin, rest, whole, end
