"""GPUs that run compiled kernels under a schedule: ranks, launches, blocks and warps.

    machine = Machine(ranks, seed)
    machine.memory.add(address, size, kind, owner, name)          # what kernels may address
    machine.launch(rank, run, grid, parameters, dependent)        # into the rank's only stream
    machine.finish()                                              # until all have ended

Every warp advances by itself and every rank too; blocks of a launch begin in any order. A dependent
launch's blocks may begin while the launch before still runs. `finish` raises `Hang` when no warp
can go on, and `memory.Hazard`. A warp that polls sleeps until something changes in memory, so a
hang is found at once.
"""

import random
from dataclasses import replace

import numpy

from tests.kernels.compiled.ptx.memory import (
    ARMED,
    COUNTER,
    PLAIN,
    Hazard,
    Knowledge,
    Memory,
    Pending,
    Region,
    Release,
)

LANES = 32
_READY, _BARRIER, _POLLS, _WAITS = "ready", "at a barrier", "polls", "waits for earlier launches"
_CHOSEN = 4  # warps that go on, one after the other, between two decisions of the schedule
_LOOKS = 4  # of every warp that polls, without a change of memory, until it hangs
_ALL = numpy.ones(LANES, bool)
_EMPTY = {size: numpy.zeros(LANES, f"u{size}") for size in (2, 4, 8)} | {1: ~_ALL}
_LANES = numpy.arange(LANES, dtype=numpy.uint32)


class Hang(AssertionError):
    """No warp can go on."""


class Warp:
    """32 lanes of a block; what a translated kernel asks of it."""

    def __init__(self, block, number):
        self.block, self.number, self.machine = block, number, block.machine
        self.name = f"block {block.index} warp {number}"
        self.all, self.lanes, self.empty = _ALL, _LANES, _EMPTY
        self.state, self.barriers = _READY, 0
        self.looks, self.told = None, False  # in what it is about to look; has stored since it did
        self.pending, self.knowledge, self.polled = [], block.knowledge, {}
        self.observed = block.knowledge  # of releases, by looks that acquired nothing
        self.steps = block.stream.run(self)

    def special(self, name, axis):
        """%tid, %ctaid, %ntid, %nctaid."""
        block = self.block
        if name == "tid":
            return _LANES + numpy.uint32(32 * self.number) if axis == "x" else _LANES * 0
        sizes = {"ctaid": block.index, "nctaid": block.grid, "ntid": (block.warps_count * 32, 1, 1)}
        return numpy.full(LANES, sizes[name]["xyz".index(axis)], numpy.uint32)

    def parameter(self, name, bits):
        """A kernel's argument, as bits."""
        value = self.block.parameters.get(name, 0)
        return numpy.full(LANES, value & ((1 << bits) - 1), f"u{bits // 8}")

    def clock(self):
        """%globaltimer: no time passes."""
        return numpy.zeros(LANES, numpy.uint64)

    def answer(self, predicate):
        """The lanes' one answer; None where they differ."""
        first = bool(predicate[0])
        return None if (predicate != first).any() else first

    def next_lanes(self, labels):
        """(the first label of the lanes', which lanes are there; None: all)."""
        first = labels.min()
        there = labels == first
        return int(first), None if there.all() else there

    def _where(self, addresses, mask, count, size):
        """(region, byte offsets of the masked lanes' elements [lanes * count])."""
        what = f"{self.block.name} {self.name}"
        region, offsets = self.machine.memory.at(addresses[mask], count * size, what)
        if count > 1:
            offsets = (offsets[:, None] + size * numpy.arange(count)).ravel()
        return region, offsets

    def load(self, addresses, mask, count, size, kind):
        """Elements [count] of uint [32]; zero where masked. kind: "weak", "strong", "acquire"."""
        if not mask.any():
            yield _READY
            return [numpy.zeros(LANES, f"u{size}")] * count
        region, offsets = self._where(addresses, mask, count, size)
        memory = self.machine.memory
        if kind == "strong" and region.kind != COUNTER:
            site = region.address + int(offsets[0])
            self.state = _POLLS if self.polled.get(site) == memory.version else _READY
            self.looks = region.kind
            yield self.state
            self.looks = None
            self.polled[site] = memory.version
        else:
            yield _READY
        self._drain_own(region, offsets, size)
        units = region.place(offsets, size)
        if region.kind != COUNTER:
            access = memory.note(self, f"a {kind} load")
            stored = region.stored[units]
            if kind == "weak":
                other = memory.unknown(stored, access, self.knowledge)
                if other is not None:
                    raise Hazard(
                        f"{describe_warp(self)} reads {region.name} that {other.what} of rank "
                        f"{other.rank}, {other.warp.name} wrote, which may not be visible yet"
                    )
            else:
                self._learn(region, stored)
            region.looked[units] = access
        if kind == "acquire":
            self._acquire(region, units)
        elif kind == "strong":
            for unit in units.tolist():
                self.observed = self.observed.joined(region.released.get(unit))
        return self._spread(region.views[size][offsets // size], mask, count, size)

    def _learn(self, region, stored):
        """A word that a peer stored says that the peer's launches before that one have ended."""
        memory, block = self.machine.memory, self.block
        for index in {*stored.tolist()}:
            if not index:
                continue
            access = memory.accesses[index]
            if access.rank != block.rank:
                self.knowledge = self.knowledge.with_ended(access.rank, access.launch)
                self.knowledge = self.knowledge.joined(access.block.knowledge_at_start)
            elif region.kind == ARMED and access.launch == block.launch and memory.strict:
                raise Hazard(
                    f"{describe_warp(self)} looks for a word of {region.name} that "
                    f"{access.warp.name} has armed again: it would wait for ever"
                )

    def _spread(self, found, mask, count, size):
        found = found.reshape(-1, count)
        if mask is _ALL:
            return [numpy.ascontiguousarray(found[:, i]) for i in range(count)]
        out = numpy.zeros((count, LANES), f"u{size}")
        out[:, mask] = found.T
        return list(out)

    def store(self, addresses, mask, values, size, release):
        """Values [count] of uint [32]; a release follows all that the warp knows of its block."""
        yield _READY
        if not mask.any():
            return
        region, offsets = self._where(addresses, mask, len(values), size)
        memory = self.machine.memory
        stored = _elements(values, mask, size)
        if release:
            self.fence()
        access = memory.note(self, "a store")
        self.told = True
        self._drain_own(region, offsets, size)
        pending = Pending(region, offsets, stored, size, access, self.knowledge)
        if release:
            memory.drain(pending)
            self._release(region, region.place(offsets, size))
        else:
            self.pending += self.machine.split(pending)

    def _drain_own(self, region, offsets, size):
        """What the block stored to these places before, as far as this warp must see it, comes."""
        low, high = int(offsets.min()), int(offsets.max()) + size
        for warp in self.block.warps:
            for pending in list(warp.pending):
                if pending.region is not region:
                    continue
                known = self.machine.memory.accesses[pending.access].barriers < self.barriers
                if warp is not self and not known:
                    continue
                first, end = int(pending.offsets.min()), int(pending.offsets.max()) + pending.width
                if first < high and low < end:
                    warp.pending.remove(pending)
                    self.machine.memory.drain(pending)

    def fence(self):
        """All that this warp stored, and what its block had stored before a barrier, is visible.

        And it knows what was released by what it has looked at.
        """
        self.knowledge = self.knowledge.joined(self.observed)
        memory = self.machine.memory
        for warp in self.block.warps:
            for pending in list(warp.pending):
                if warp is self or memory.accesses[pending.access].barriers < self.barriers:
                    warp.pending.remove(pending)
                    memory.drain(pending)

    def _release(self, region, units):
        now = len(self.machine.memory.accesses)
        made = dict(self.knowledge.releases)
        made[self.block] = Release(self, self.barriers, now)
        said = Knowledge(self.knowledge.ended, made)
        for unit in units.tolist():
            before = region.released.get(unit)
            region.released[unit] = said.joined(before)

    def _acquire(self, region, units):
        for unit in units.tolist():
            self.knowledge = self.knowledge.joined(region.released.get(unit))

    def atomic(self, addresses, mask, values, operation, kind, order):
        """What stood there [32]; lanes one after the other."""
        yield _READY
        size = int(kind[1:]) // 8
        found = numpy.zeros(LANES, f"u{size}")
        if not mask.any():
            return found
        region, offsets = self._where(addresses, mask, 1, size)
        memory = self.machine.memory
        if order in ("release", "acq_rel"):
            self.fence()
        self._drain_own(region, offsets, size)
        units = region.place(offsets, size)
        if order in ("acquire", "acq_rel"):
            self._acquire(region, units)
        access = memory.note(self, f"an atomic {operation}")
        self.told = True
        if operation == "exch":
            memory.check_over(region, units, access, self.knowledge)
        found[mask] = _apply(region.views[size], offsets // size, values, mask, operation, kind)
        region.stored[units] = access
        memory.version += 1
        if order in ("release", "acq_rel"):
            self._release(region, units)
        return found

    def load_shared(self, addresses, mask, count, size):
        """As `load`, of the block's shared memory; at once."""
        if not mask.any():
            return [numpy.zeros(LANES, f"u{size}")] * count
        region, offsets, units = self._shared(addresses, mask, count, size)
        self._check_shared(region.stored[units], "reads what")
        region.looked[units] = self.machine.memory.note(self, "a load")
        return self._spread(region.views[size][offsets // size], mask, count, size)

    def store_shared(self, addresses, mask, values, size):
        """As `store`, to the block's shared memory; at once."""
        if not mask.any():
            return
        region, offsets, units = self._shared(addresses, mask, len(values), size)
        stored = _elements(values, mask, size)
        view, at = region.views[size], offsets // size
        self._check_shared(region.looked[units], "overwrites what")
        if (view[at] != stored).any():  # warps may store the same
            self._check_shared(region.stored[units], "overwrites what")
        region.stored[units] = self.machine.memory.note(self, "a store")
        view[at] = stored

    def load_matrices(self, addresses, count, transposed):
        """ldmatrix: 8x8 elements of 2 bytes each, a row of 16 bytes at each lane's address."""
        whole = self.load_shared(addresses, self.all, 4, 4)
        rows = numpy.stack(whole, axis=1).view(numpy.uint16).reshape(4, 8, 8)
        lane = numpy.arange(LANES)
        found = []
        for matrix in rows[:count]:
            matrix = matrix.T if transposed else matrix
            pairs = numpy.stack([matrix[lane // 4, lane % 4 * 2 + i] for i in (0, 1)], axis=1)
            found.append(numpy.ascontiguousarray(pairs).view(numpy.uint32).ravel())
        return found

    def store_matrices(self, addresses, values, transposed):
        """stmatrix: the reverse of `load_matrices`, without its transposed form."""
        if transposed:
            raise NotImplementedError("PTX: stmatrix.trans")
        lane = numpy.arange(LANES)
        for i, value in enumerate(values):
            at = addresses[8 * i + lane // 4] + (4 * (lane % 4)).astype(numpy.uint64)
            self.store_shared(at, self.all, (value,), 4)

    def atomic_shared(self, addresses, mask, values, operation, kind, order):
        """As `atomic`, of the block's shared memory."""
        size = int(kind[1:]) // 8
        found = numpy.zeros(LANES, f"u{size}")
        if mask.any():
            region, offsets, _ = self._shared(addresses, mask, 1, size)
            found[mask] = _apply(region.views[size], offsets // size, values, mask, operation, kind)
        return found

    def _shared(self, addresses, mask, count, size):
        offsets = addresses[mask].astype(numpy.int64)
        region = self.block.shared
        if int(offsets.max()) + count * size > region.size:
            raise Hazard(f"{describe_warp(self)}: beyond shared memory")
        if count > 1:
            offsets = (offsets[:, None] + size * numpy.arange(count)).ravel()
        return region, offsets, region.place(offsets, size)

    def _check_shared(self, indices, what):
        for index in {*indices.tolist()} if self.machine.memory.strict else ():
            if index:
                access = self.machine.memory.accesses[index]
                if access.warp is not self and access.barriers >= self.barriers:
                    raise Hazard(
                        f"{describe_warp(self)} {what} {access.warp.name} uses in shared memory, "
                        "without a barrier between them"
                    )

    def barrier(self):
        """bar.sync of the whole block."""
        self.state = _BARRIER
        yield _BARRIER

    def await_earlier(self):
        """griddepcontrol.wait: all earlier launches have ended and what they stored is visible."""
        self.state = _WAITS
        yield _WAITS
        ended = self.machine.streams[self.block.rank].ended
        self.knowledge = self.knowledge.joined(ended.knowledge)
        self.block.knowledge_at_start = self.knowledge


def _elements(values, mask, size):
    """Values [count] of uint [32] as the masked lanes' elements, lane by lane."""
    whole = [numpy.broadcast_to(numpy.asarray(v).astype(f"u{size}"), LANES) for v in values]
    return numpy.stack([value[mask] for value in whole], axis=1).ravel()


def describe_warp(warp):
    """Which warp, in words."""
    return f"rank {warp.block.rank}, launch {warp.block.launch}, {warp.name}"


def _apply(view, at, values, mask, operation, kind):
    """Read, compute and write, one lane after the other; what stood there."""
    given = [numpy.broadcast_to(numpy.asarray(v), LANES)[mask] for v in values]
    found = numpy.empty(len(at), view.dtype)
    number = lambda x: x.view(f"{'i' if kind[0] == 's' else kind[0]}{view.dtype.itemsize}")
    for lane, place in enumerate(at.tolist()):
        before = view[place : place + 1].copy()
        value = given[0][lane : lane + 1].view(view.dtype)
        found[lane] = before[0]
        if operation == "add":
            after = (number(before) + number(value)).view(view.dtype)
        elif operation in ("min", "max"):
            choose = numpy.minimum if operation == "min" else numpy.maximum
            after = choose(number(before), number(value)).view(view.dtype)
        elif operation == "exch":
            after = value
        elif operation == "cas":
            after = given[1][lane : lane + 1].view(view.dtype) if before == value else before
        elif operation in ("or", "and", "xor"):
            after = {"or": before | value, "and": before & value, "xor": before ^ value}[operation]
        else:
            raise NotImplementedError(f"PTX: an atomic {operation}")
        view[place] = after[0]
    return found


class Block:
    """A program of a launch: its warps and their shared memory."""

    def __init__(self, stream, index):
        self.stream, self.index, self.machine = stream, index, stream.machine
        self.rank, self.launch = stream.rank, stream.number
        self.grid, self.parameters = stream.grid, stream.parameters
        self.name = f"rank {self.rank}, launch {self.launch}"
        self.shared = Region(0, stream.shared_bytes, PLAIN, self.rank, "shared memory")
        self.warps_count = stream.run.threads // LANES
        self.knowledge = self.knowledge_at_start = stream.known_at_start()
        self.warps = []
        self.warps = [Warp(self, number) for number in range(self.warps_count)]

    def pass_barrier(self):
        """Once all warps have come, all go on and know what each knew."""
        if any(warp.state != _BARRIER for warp in self.warps):
            return
        knowledge = self.warps[0].knowledge
        for warp in self.warps[1:]:
            knowledge = knowledge.joined(warp.knowledge)
        for warp in self.warps:
            warp.knowledge, warp.state = knowledge, _READY
            warp.barriers += 1


class Launch:
    """A kernel in a rank's stream."""

    def __init__(self, machine, rank, number, run, grid, parameters, dependent, shared_bytes):
        self.machine, self.rank, self.number, self.run = machine, rank, number, run
        self.grid, self.parameters, self.dependent = grid, parameters, dependent
        self.shared_bytes = shared_bytes
        self.waiting = [
            (x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])
        ]
        machine.random.shuffle(self.waiting)
        self.blocks, self.running = [], []

    def known_at_start(self):
        """A plain launch begins when all before have ended; a dependent one knows nothing yet."""
        stream = self.machine.streams[self.rank]
        if self.dependent:
            return Knowledge((0,) * self.machine.memory.ranks)
        return stream.ended.knowledge

    @property
    def over(self):
        """Whether all blocks have ended and all that they stored is in memory."""
        return (
            not self.waiting
            and not self.running
            and not any(warp.pending for block in self.blocks for warp in block.warps)
        )


class Ended:
    """What has ended in a stream."""

    def __init__(self, ranks):
        self.launches, self.knowledge = 0, Knowledge((0,) * ranks)


class Stream:
    """A rank's launches, one after the other."""

    def __init__(self, machine, rank):
        self.machine, self.rank, self.launches, self.count = machine, rank, [], 0
        self.ended = Ended(machine.memory.ranks)

    def retire(self):
        """Take note of launches that have ended."""
        while self.launches and self.launches[0].over:
            done = self.launches.pop(0)
            knowledge = self.ended.knowledge
            for block in done.blocks:
                for warp in block.warps:
                    knowledge = knowledge.joined(warp.knowledge)
            self.ended.launches = done.number + 1
            self.ended.knowledge = knowledge.with_ended(self.rank, done.number + 1).trimmed()
            self.machine.memory.version += 1

    def startable(self, resident):
        """The launch that may begin a block now, or None."""
        running = sum(len(launch.running) for launch in self.launches)
        if running >= resident:
            return None
        for place, launch in enumerate(self.launches):
            if launch.waiting:
                return launch if place == 0 or launch.dependent else None
        return None


class Machine:
    """Ranks that share memory.

    resident: blocks of a rank that run at once, of all launches. strict: hazards are found too, not
    just hangs. left: how often a warp that has stored is left where it begins to look for a word.
    lags(warp): whether it goes on only when nothing else can.
    """

    def __init__(self, ranks, seed, resident=1 << 30, strict=True, left=0.15, lags=None):
        self.memory, self.random = Memory(ranks, strict), random.Random(seed)
        self.streams = [Stream(self, rank) for rank in range(ranks)]
        self.lags = lags or (lambda warp: False)
        self.resident, self.left, self.steps, self.kept = resident, left, 0, []

    def launch(self, rank, run, grid, parameters, dependent, shared_bytes):
        """Put a kernel into a rank's stream."""
        stream = self.streams[rank]
        made = Launch(self, rank, stream.count, run, grid, parameters, dependent, shared_bytes)
        stream.count += 1
        stream.launches.append(made)

    def split(self, pending):
        """A store in parts that become visible apart."""
        if len(pending.offsets) == 1 or self.random.random() < 0.7:
            return [pending]
        second = numpy.array([self.random.random() < 0.5 for _ in pending.offsets])
        parts = [part for part in (second, ~second) if part.any()]
        return [
            replace(pending, offsets=pending.offsets[part], values=pending.values[part])
            for part in parts
        ]

    def finish(self):
        """Run until every launch has ended."""
        self.focus, stalled = Focus(self.random, len(self.streams)), (0, 0)
        while True:
            warps = self._live()
            for stream in self.streams:
                stream.retire()
            starts = [s for s in self.streams if s.startable(self.resident)]
            ready = [warp for warp in warps if self._may_go(warp)]
            pending = [warp for warp in self._storing() if warp.pending]
            if not ready and not starts and not pending:
                if not any(stream.launches for stream in self.streams):
                    return
                version, times = stalled
                stalled = self.memory.version, times + 1 if version == self.memory.version else 0
                if stalled[1] == _LOOKS:
                    raise Hang(self._blocked(warps))
                for warp in warps:  # a block decides by looks that its warps took at several times
                    warp.polled.clear()
                    warp.state = _READY if warp.state == _POLLS else warp.state
                continue
            focus = self.focus
            focus.steps -= 1
            free = [warp for warp in ready if not self.lags(warp)]
            free = free if free or starts or pending else ready
            wanted = [warp for warp in free if focus.takes(warp)]
            if focus.steps <= 0 or not (wanted or starts or pending):
                self.focus = Focus(self.random, len(self.streams), warps)
            if starts and (not wanted or self.random.random() < focus.starts):
                self._start(self.random.choice(starts))
                continue
            if pending and (not wanted or self.random.random() < focus.drains):
                self._drain_one(self.random.choice(pending))
                continue
            for _ in range(_CHOSEN):
                self._advance(self.random.choice(wanted or free), self.random.choice(focus.bursts))

    def _live(self):
        return [warp for warp in self._warps("running") if warp.steps is not None]

    def _storing(self):
        return self._warps("blocks")

    def _warps(self, blocks):
        """The warps of all launches' blocks, or of those that are running."""
        return [
            warp
            for stream in self.streams
            for launch in stream.launches
            for block in getattr(launch, blocks)
            for warp in block.warps
        ]

    def _may_go(self, warp):
        if warp.state == _POLLS:
            return warp.polled_version != self.memory.version
        if warp.state == _WAITS:
            return self.streams[warp.block.rank].ended.launches >= warp.block.launch
        return warp.state == _READY

    def _start(self, stream):
        launch = stream.startable(self.resident)
        block = Block(launch, launch.waiting.pop())
        launch.blocks.append(block)
        launch.running.append(block)

    def _drain_one(self, warp):
        pending = warp.pending.pop(self.random.randrange(len(warp.pending)))
        self.memory.drain(pending)

    def _advance(self, warp, burst):
        for _ in range(burst):
            self.steps += 1
            if not self._may_go(warp):
                return
            warp.state = _READY
            try:
                state = next(warp.steps)
            except StopIteration:
                warp.steps, warp.state = None, "ended"
                self._end(warp.block)
                return
            warp.polled_version = self.memory.version
            if warp.looks and warp.told:
                warp.told = False
                if self.random.random() < self.left:
                    self.focus = Focus(self.random, len(self.streams), [warp], leaves=True)
                    return
            if state == _BARRIER:
                warp.block.pass_barrier()
                if warp.state == _BARRIER:
                    return

    def _end(self, block):
        if any(warp.state == _BARRIER for warp in block.warps):
            raise Hang(f"{block.name}: a warp has ended that others meet at a barrier")
        if all(warp.steps is None for warp in block.warps):
            launch = block.stream
            launch.running.remove(block)

    def _blocked(self, warps):
        said = [f"{describe_warp(warp)} {warp.state}" for warp in warps]
        return "no warp can go on: " + "; ".join(said)


class Focus:
    """What a stretch of the schedule prefers: some ranks, some warps, late or early stores.

    Half of them leave a warp or a block where it stands until nothing else can go on.
    """

    def __init__(self, random, ranks, warps=(), leaves=False):
        """leaves: a warp is left, and not just half the time."""
        self.ranks = {rank for rank in range(ranks) if random.random() < 0.5} or {*range(ranks)}
        self.kept = random.choice(((0, 1), (0, 2), (1, 2), (0, 3)))
        self.drains = random.choice((0.02, 0.2, 0.6))
        self.starts = random.choice((0.01, 0.3, 0.9))
        self.bursts = random.choice(((1,), (1, 4), (16, 64)))
        self.steps = random.choice((2, 8, 30))
        self.left = None
        if warps and (leaves or random.random() < 0.5):
            self.left, self.steps = random.choice(warps), 1 << 30
            self.whole_block = random.random() < 0.5

    def takes(self, warp):
        """Whether a warp is among the preferred."""
        if self.left is not None:
            return warp.block is not self.left.block if self.whole_block else warp is not self.left
        first, every = self.kept
        return warp.block.rank in self.ranks and warp.number % every == first
