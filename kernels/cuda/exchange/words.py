"""Words in peers' memory that carry their own validity: helpers of all exchange kernels.

A slot is *armed* when every word of it has all bits set, a NaN that no addition and no rounding
gives (those give 0x7FFFFFFF and 0x7FFF); a word of data that had this pattern is sent as that NaN.
A producer stores plain data into the slots of its peers; the consumer, who owns the memory, loads
until no word is armed any more, uses the words, and arms them again. There is no flag, so no fence
and no order between words is needed: each says for itself whether it has come, and one crossing of
the link is all that is waited for.

Why two buffers, used in turn, are enough (`counter` numbers the exchanges of one kind, in device
memory, so that a replayed graph with fixed arguments takes them in turn too):

1. Kernels of a rank's exchanges run in one stream, one after the other.
2. In every exchange a rank waits for at least one word of each of its peers.
3. So when rank A runs exchange e + 2, it has completed e + 1, where it saw a word that peer B
   pushed in B's own e + 1, which B began after B's e had ended: B has read and armed again all of
   buffer e mod 2, by stores that the end of a kernel has put into the memory of B.

Hence A's words of e + 2 meet an armed buffer, and B cannot take words of e + 2 for those of e.
What is pushed is read and armed in the same exchange, however many rows it has: nothing is left
behind for one with other rows. Dependent launches (`dependent`) change none of this: a kernel's
first statement waits until all earlier ones of its stream have ended and their stores are in
memory, and waits for no peer; its successor comes when its last program has ended.

A word is armed again once all warps have seen it. Of a tile with fewer words than a warp has
threads (a word of each rank) every warp loads all, and leaves its loop by what it saw itself, but
one thread arms them: a warp that came to a word armed again would wait for ever. No tile has more
words than a warp has threads and fewer than the program has (`warps_for`): it would be cut over
some warps and repeated by others, which see it at other times.
"""

import triton
import triton.language as tl

from tpdet.kernels.cuda.exchange.arguments import LOST_BASE
from tpdet.kernels.cuda.pointwise.fold import push_and_add

ARMED = tl.constexpr(-1)
QUIET_16 = tl.constexpr(0x7FFF)  # the NaN that a value of 2 bytes with all bits set becomes
QUIET_32 = tl.constexpr(0x7FFFFFFF)  # the same of 4 bytes
QUIET_PAIR = tl.constexpr(0x7FFF7FFF)  # two of 2 bytes, or one of 4: a NaN either way
EPOCHS = tl.constexpr((1 << 31) - 1)  # tags and flags hold 1 to this; new memory holds 0
_WARP = 32  # threads
_POLLS = tl.constexpr(256)  # of about a microsecond, between two readings of clock and control
_LOST_BASE = tl.constexpr(LOST_BASE)


def warps_for(words: int, most: int) -> int:
    """Warps of a program that awaits tiles of `words`, a power of two: each has some of its own."""
    return max(1, min(most, words // _WARP))


@triton.jit
def words_of(table, rank, WORD: tl.constexpr):
    """Pointer to the start of a rank's shared memory; `table` [ranks] int64 holds addresses."""
    return tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(WORD)), 16)


@triton.jit
def advance(counter):
    """Number this kind's next exchange, once every program has read the number of this one."""
    epoch = tl.load(counter)
    tl.debug_barrier()  # all warps have it
    arrived = tl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(counter + 1, 0)
        tl.store(counter, epoch + 1)


@triton.jit
def next_poll(missing, polls, deadline, links, number, WORLD: tl.constexpr):
    """(waiting, deadline) after a poll; missing: source + 1 of each word, 0 where it has come.

    The control words are read once in _POLLS polls. What is decided from them comes out of a
    reduction over the tile, so all threads decide alike that share its words; warps that each have
    all of a small tile decide apart. Unless `WORLD.live`, a kernel polls once (tests).
    """
    waiting = tl.max(tl.max(missing, axis=1), axis=0)
    if WORLD.live:
        if (waiting != 0) & (polls % _POLLS == _POLLS - 1):
            now = tl.inline_asm_elementwise(
                "mov.u64 $0, %globaltimer;",
                "=l,r",
                [missing],
                dtype=tl.int64,
                is_pure=False,
                pack=1,
            )
            now = tl.max(tl.max(now, axis=1), axis=0)
            lost = tl.load(links.control + missing * 0, volatile=True)
            lost = tl.max(tl.max(lost, axis=1), axis=0)
            limit = tl.load(links.control + 1 + missing * 0, volatile=True)
            limit = tl.max(tl.max(limit, axis=1), axis=0)
            if deadline == 0:
                deadline = now + limit
            if lost != 0:
                waiting = 0
            elif now >= deadline:
                tl.store(links.control, number * _LOST_BASE + waiting)
                waiting = 0
    else:
        waiting = waiting * 0
    return waiting, deadline


@triton.jit
def push_roots(
    sums,
    at,
    links,
    first,
    last,
    target,
    slot_plane,
    present,
    PROGRAM: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Fold own sums at `at` of their planes; store root i at `target` + i * slot_plane.

    The roots go to ranks first .. last - 1, counted modulo the number of ranks.
    """
    stack = ()
    for i in tl.static_range(len(PROGRAM.planes)):
        own = sums.planes + PROGRAM.planes[i] * sums.stride.to(tl.int64)
        value = tl.load(own + at, mask=present, other=0.0)
        stack = push_and_add(stack, value, PROGRAM.additions[i])
        if PROGRAM.roots[i] >= 0:
            slot = target + PROGRAM.roots[i] * slot_plane
            word = stack[0].to(tl.int32, bitcast=True)
            word = tl.where(word == ARMED, QUIET_32, word)
            for peer in range(first, last):
                slots = words_of(links.table, peer % WORLD.ranks, tl.int32)
                tl.store(slots + slot, word, mask=present)
            stack = stack[1:]


@triton.jit
def awaited_sum(
    sums,
    at,
    slots,
    target,
    slot_plane,
    present,
    links,
    number,
    PROGRAM: tl.constexpr,
    WORLD: tl.constexpr,
):
    """The whole fold over own sums and slots, once all words have come; arms the slots again.

    Operands of a peer are planes of `slots` + `target`, slot_plane apart.
    """
    # 1. Fold again and again until no operand was a word that has not come.
    total = tl.zeros(at.shape, tl.float32)
    waiting = 1
    polls = 0
    deadline = tl.full((), 0, tl.int64)
    while waiting != 0:
        missing = tl.zeros(at.shape, tl.int32)
        stack = ()
        for i in tl.static_range(len(PROGRAM.planes)):
            if PROGRAM.sources[i] < 0:
                own = sums.planes + PROGRAM.planes[i] * sums.stride.to(tl.int64)
                value = tl.load(own + at, mask=present, other=0.0)
            else:
                slot = target + PROGRAM.planes[i] * slot_plane
                word = tl.load(slots + slot, mask=present, other=0, volatile=True)
                missing = tl.where(word == ARMED, PROGRAM.sources[i] + 1, missing)
                value = word.to(tl.float32, bitcast=True)
            stack = push_and_add(stack, value, PROGRAM.additions[i])
        total = stack[0]  # type: ignore[misc] # no longer the empty tuple
        waiting, deadline = next_poll(missing, polls, deadline, links, number, WORLD)
        polls += 1
    # 2. Arm the slots for the exchange after the next, once every warp has seen the words.
    tl.debug_barrier()
    for i in tl.static_range(len(PROGRAM.planes)):
        if PROGRAM.sources[i] >= 0:
            slot = target + PROGRAM.planes[i] * slot_plane
            tl.store(slots + slot, tl.full(at.shape, ARMED, tl.int32), mask=present)
    return total


@triton.jit
def awaited_words(slots, at, present, source, links, number, WORLD: tl.constexpr):
    """Words at `slots` + `at`, once all have come; arms them again. source: the sender of each."""
    words = tl.full(at.shape, ARMED, slots.dtype.element_ty)
    waiting = 1
    polls = 0
    deadline = tl.full((), 0, tl.int64)
    while waiting != 0:
        words = tl.load(slots + at, mask=present, other=0, volatile=True)
        missing = tl.where(words == ARMED, source + 1, 0)
        waiting, deadline = next_poll(missing, polls, deadline, links, number, WORLD)
        polls += 1
    tl.debug_barrier()  # every warp has seen the words
    tl.store(slots + at, tl.full(at.shape, ARMED, slots.dtype.element_ty), mask=present)
    return words
