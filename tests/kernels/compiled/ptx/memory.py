"""Memory of several GPUs that warps share: what was stored may be seen late, and who knew of whom.

A store waits in its warp's buffer until the schedule, a fence or the end of its kernel puts it into
memory, in any order and element by element. Each element keeps its last store and its last look, as
`Access`; `Knowledge` is what a warp may take for done. A use of what it may not is a `Hazard`.
"""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy

ARMED, TAGGED, FLAG, PLAIN, COUNTER = "armed", "tagged", "flag", "plain", "counter"
"""Kinds of memory: words that say themselves whether they came, by all bits set or by a tag; flags,
which may say what comes next; what only order makes safe; counters and control words."""

_UNIT, _BYTE = 2, 1  # bytes of the smallest element that is stored, to shared memory too


_UNITS = {count: numpy.arange(count) for count in (2, 4, 8)}


class Hazard(AssertionError):
    """Something that another schedule, or another GPU, would turn into wrong bits or a hang."""


class Access(NamedTuple):
    """A warp's use of memory: who, in which launch of its rank, behind how many barriers, when."""

    warp: object
    block: object
    rank: int
    launch: int
    barriers: int
    time: int
    what: str


class Release(NamedTuple):
    """What whoever acquires it knows: all that its block had done before its last barrier, and all
    that the warp itself had done until then, and what that knew."""

    warp: object
    barriers: int
    time: int


class Knowledge:
    """What a warp knows to be done: launches of each rank that have ended, and releases."""

    def __init__(self, ended, releases=()):
        self.ended, self.releases = ended, dict(releases)

    def joined(self, other):
        """Both; itself if the other adds nothing."""
        if other is self or other is None:
            return self
        ended = tuple(map(max, self.ended, other.ended))
        releases = dict(self.releases)
        for block, release in other.releases.items():
            known = releases.get(block)
            if known is None or known.time < release.time:
                releases[block] = release
        if ended == self.ended and releases == self.releases:
            return self
        return Knowledge(ended, releases)

    def with_ended(self, rank, launches):
        """Knows that a rank's first `launches` have ended."""
        if self.ended[rank] >= launches:
            return self
        ended = list(self.ended)
        ended[rank] = launches
        return Knowledge(tuple(ended), self.releases)

    def trimmed(self):
        """The same without releases of launches that have ended: they say no more."""
        kept = {b: r for b, r in self.releases.items() if b.launch >= self.ended[b.rank]}
        return Knowledge(self.ended, kept)

    def covers(self, access, warp, barriers):
        """Whether what was done is done for a warp that stands behind so many barriers."""
        if access.warp is warp:
            return True
        if access.block is warp.block:
            return access.barriers < barriers
        if access.launch < self.ended[access.rank]:
            return True
        release = self.releases.get(access.block)
        return (
            release is not None
            and access.time <= release.time
            and (access.barriers < release.barriers or access.warp is release.warp)
        )


class Region:
    """Some bytes of one kind, with their addresses; owner: the rank whose memory it is."""

    def __init__(self, address, size, kind, owner, name):
        self.address, self.size, self.kind, self.owner, self.name = address, size, kind, owner, name
        raw = (ctypes.c_uint8 * size).from_address(address) if address else numpy.zeros(size, "u1")
        whole = numpy.frombuffer(raw, numpy.uint8) if address else raw
        self.views = {
            width: whole[: size // width * width].view(f"u{width}") for width in (1, 2, 4, 8)
        }
        self.unit = _UNIT if address else _BYTE
        count = -(-size // self.unit)
        self.stored = numpy.zeros(count, numpy.int64)  # indices of accesses; 0: none
        self.looked = numpy.zeros(count, numpy.int64)
        self.released = {}

    def place(self, offsets, width):
        """Indices of the units of elements at these byte offsets: [elements, units of one]."""
        units, count = offsets // self.unit, width // self.unit
        return units if count <= 1 else (units[:, None] + _UNITS[count]).ravel()


@dataclass(frozen=True, eq=False)
class Pending:
    """Elements that were stored and are not in memory: of one width, at byte offsets."""

    region: Region
    offsets: numpy.ndarray
    values: numpy.ndarray
    width: int
    access: int
    knowledge: Knowledge


class Memory:
    """All regions of all ranks, and the log of accesses."""

    def __init__(self, ranks, strict):
        self.regions, self.ranks, self.strict = [], ranks, strict
        self.accesses = [None]
        self.version = 0

    def add(self, address, size, kind, owner, name):
        """Make bytes addressable; those that are already keep their kind."""
        for region in self.regions:
            if region.address <= address and address + size <= region.address + region.size:
                return region
        region = Region(address, size, kind, owner, name)
        self.regions.append(region)
        return region

    def at(self, addresses, size, what):
        """(region, byte offsets) of accesses of `size` bytes. Raises Hazard for wild addresses."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        for region in self.regions:
            if region.address <= low and high <= region.address + region.size:
                return region, (addresses - numpy.uint64(region.address)).astype(numpy.int64)
        raise Hazard(f"{what}: no memory at {low:#x} to {high:#x}")

    def note(self, warp, what):
        """The number of a new access."""
        block = warp.block
        self.accesses.append(
            Access(warp, block, block.rank, block.launch, warp.barriers, len(self.accesses), what)
        )
        return len(self.accesses) - 1

    def unknown(self, indices, access, knowledge, earlier=False):
        """The first of these accesses that `access` may not take for done, or None.

        earlier: of those alone that launches with a lower number made.
        """
        mine = self.accesses[access]
        for index in {*indices.tolist()} if self.strict else ():
            if not index or (earlier and self.accesses[index].launch >= mine.launch):
                continue
            if not knowledge.covers(self.accesses[index], mine.warp, mine.barriers):
                return self.accesses[index]
        return None

    def check_over(self, region, units, access, knowledge):
        """Raise Hazard for a store where what stood there may still be needed."""
        mine = self.accesses[access]
        for noted, said in self._needed(region, mine):
            other = self.unknown(noted[units], access, knowledge, region.kind == TAGGED)
            if other is not None:
                raise Hazard(
                    f"{describe(mine)} stores to {region.name} what {describe(other)} {said}, and "
                    "does not know that this is over"
                )

    def _needed(self, region, mine):
        """Earlier uses that a store must know to be over.

        Words are armed once all have looked, and stored once they are armed; a tag is overwritten
        once earlier exchanges have ended.
        """
        looked, stored = (region.looked, "looked at"), (region.stored, "stored")
        if region.kind == ARMED:
            return [looked] if mine.rank == region.owner else [stored]
        # What a kernel knows of flags and counters is in their values.
        return {TAGGED: [looked], PLAIN: [looked, stored]}.get(region.kind, [])

    def drain(self, pending):
        """Put stored elements into memory. Raises Hazard where what stood there is still needed."""
        region, offsets, values, width = (
            pending.region,
            pending.offsets,
            pending.values,
            pending.width,
        )
        access, knowledge = pending.access, pending.knowledge
        mine, at = self.accesses[access], offsets // width
        units = region.place(offsets, width)
        view = region.views[width]
        if region.kind == ARMED and self.strict:
            self._check_words(region, view[at], values, mine)
        self.check_over(region, units, access, knowledge)
        view[at] = values
        region.stored[units] = access
        self.version += 1

    def _check_words(self, region, before, values, mine):
        armed = values.dtype.type(~values.dtype.type(0))
        arms = values == armed
        if mine.rank == region.owner:
            if not arms.all():
                raise Hazard(f"{describe(mine)} stores data to its own slots in {region.name}")
            if (before == armed).any():
                raise Hazard(f"{describe(mine)} arms words of {region.name} that have not come")
        else:
            if arms.any():
                raise Hazard(f"{describe(mine)} arms a peer's words in {region.name}")
            if (before != armed).any():
                raise Hazard(f"{describe(mine)} overwrites words of {region.name} that nobody took")


def describe(access):
    """Who it was, in words."""
    return f"rank {access.rank}, launch {access.launch}, {access.warp.name} ({access.what})"
