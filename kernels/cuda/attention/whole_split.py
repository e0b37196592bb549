"""What a group of four warps does with the tiles that the fetching warp of its program brings.

The arithmetic is that of `split.py`, tile for tile, for 64 rows in registers; K and V lie in
rings of STAGES places, each free again once both groups have released it. Tiles are counted from
the first one that the program fetches.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpdet.kernels.cuda.attention.split import TILE, TILES, UNSEEN
from tpdet.kernels.cuda.launch.warp_pipeline import release

GROUP_ROWS = gl.constexpr(64)  # of a group of four warps: the height of their instructions
MASSES = gl.constexpr(8)  # the narrowest product there is


@gluon.jit
def weigh(score, scale, largest, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Raised maximum [R], factor of the state so far [R], rounded weights as an operand."""
    raised = gl.maximum(largest, gl.max(score, 1) * scale)
    shrink = gl.exp2(largest - raised)
    weight = gl.exp2(gl.fma(score, scale, -raised[:, None])).to(dtype)
    return raised, shrink, gl.convert_layout(weight, OPERAND)


@gluon.jit
def ask(q_half, k_ring, k_full, tile, STAGES: gl.constexpr):
    """Scores of a tile, counted from the first one, once it is there; they are on their way."""
    BY_KEY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    empty = gl.zeros((GROUP_ROWS, TILE), gl.float32, layout=BY_KEY)
    place = tile % STAGES
    mbarrier.wait(k_full.index(place), tile // STAGES & 1)
    keys = k_ring.index(place).permute((1, 0))
    return warpgroup_mma(q_half, keys, empty, use_acc=False, is_async=True)


@gluon.jit
def add(weight, v_ring, ones, v_full, tile, o, w, STAGES: gl.constexpr, NARROW: gl.constexpr):
    """Weights times a tile's values onto o, and times ones onto w; both are on their way."""
    mbarrier.wait(v_full.index(tile % STAGES), tile // STAGES & 1)
    sums = warpgroup_mma(weight, v_ring.index(tile % STAGES), o, is_async=True)
    masses = warpgroup_mma(gl.convert_layout(weight, NARROW), ones, w, is_async=True)
    return sums, masses


@gluon.jit
def shrink_sums(o, w, factor, WIDE: gl.constexpr, NARROW: gl.constexpr):
    """A state's sums times the factor of its rows."""
    o = o * gl.convert_layout(factor, gl.SliceLayout(1, WIDE))[:, None]
    return o, w * gl.convert_layout(factor, gl.SliceLayout(1, NARROW))[:, None]


@gluon.jit
def whole_split(
    q_half,
    k_ring,
    v_ring,
    ones,
    k_full,
    v_full,
    free,
    first,
    scale,
    HEAD: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The state of a split of which every row sees every key; `first` is its first tile.

    Straight code, as the assembler lets products stay under way over no branch back: the scores of
    tile j + 1 are asked for before the sums of tile j - 1 shrink and take the products of tile j.
    """
    BY_KEY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    MASS_WEIGHT: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)
    dtype: gl.constexpr = k_ring.dtype
    m = gl.full((GROUP_ROWS,), UNSEEN, gl.float32, layout=gl.SliceLayout(1, BY_KEY))
    o = gl.zeros((GROUP_ROWS, HEAD), gl.float32, layout=WIDE)
    w = gl.zeros((GROUP_ROWS, MASSES), gl.float32, layout=NARROW)
    score = ask(q_half, k_ring, k_full, first, STAGES)
    score = warpgroup_mma_wait(0, deps=(score,))
    m, shrink, weight = weigh(score, scale, m, dtype, WEIGHT)
    sums, masses, taken = o, w, weight
    for step in gl.static_range(1, TILES):
        tile = first + step
        scores = ask(q_half, k_ring, k_full, tile, STAGES)
        if step > 1:
            o, w, taken = warpgroup_mma_wait(1, deps=(sums, masses, taken))
            release(free.index((tile - 2) % STAGES))
            o, w = shrink_sums(o, w, shrink, WIDE, NARROW)
        sums, masses = add(weight, v_ring, ones, v_full, tile - 1, o, w, STAGES, MASS_WEIGHT)
        taken = weight
        score = warpgroup_mma_wait(2, deps=(scores,))
        m, shrink, weight = weigh(score, scale, m, dtype, WEIGHT)
    last = first + TILES - 1
    o, w, taken = warpgroup_mma_wait(0, deps=(sums, masses, taken))
    release(free.index((last - 1) % STAGES))
    o, w = shrink_sums(o, w, shrink, WIDE, NARROW)
    sums, masses = add(weight, v_ring, ones, v_full, last, o, w, STAGES, MASS_WEIGHT)
    o, w, weight = warpgroup_mma_wait(0, deps=(sums, masses, weight))
    release(free.index(last % STAGES))
    return m, w, o
