"""How the rows of long sequences are dealt out to programs that each take many of them.

blocks  [T, 2] int32: a sequence and its first token of a block of BLOCK tokens
rows    [B, 3] int32: a sequence's first row of q, its tokens in the step, its first position
item    128 rows of a block for one key head; a row is a token and one of GROUP query heads
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpdet.kernels.cuda.attention.split import TILE, TILES
from tpdet.kernels.cuda.launch.warp_pipeline import CONSUMER_ROWS


@gluon.jit
def item_of(
    turn,
    items,
    blocks,
    rows,
    window,
    SHAPE: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """The item that a program takes in a turn: 128 rows of a key head, on tiles [begin, end).

    The items with the most keys come first, and every second turn runs the other way, so that all
    programs get about the same work. Where `end` is 0 no item remains. All rows see all keys before
    tile `whole`, and splits before tile `rest` are whole.
    """
    GROUP: gl.constexpr = SHAPE.GROUP
    PARTS: gl.constexpr = BLOCK * GROUP // (2 * CONSUMER_ROWS)
    across = gl.num_programs(0)
    program = gl.program_id(0)
    item = turn * across + program + turn % 2 * (across - 1 - 2 * program)
    within = gl.minimum(item, items - 1)
    head = within % SHAPE.KEY_HEADS
    work = within // SHAPE.KEY_HEADS
    part = PARTS - 1 - work % PARTS
    sequence = gl.load(blocks + work // PARTS * 2)
    first = gl.load(blocks + work // PARTS * 2 + 1)
    first_row = gl.load(rows + sequence * 3)
    count = gl.load(rows + sequence * 3 + 1)
    start = gl.load(rows + sequence * 3 + 2)
    row = part * (2 * CONSUMER_ROWS)
    low = first + row // GROUP
    high = gl.minimum(first + (row + 2 * CONSUMER_ROWS - 1) // GROUP, count - 1)
    end = gl.where((item < items) & (low < count), (start + high) // TILE + 1, 0)
    begin = 0
    whole = (start + low + 1) // TILE
    rest = gl.minimum(whole, end - 1) // TILES * TILES
    if SHAPE.WINDOW:
        begin = gl.maximum(start + low - window + 1, 0) // TILE
        whole = begin
        rest = begin
    return sequence, head, row, first, first_row, count, start, begin, rest, whole, end
