"""GPU memory given to a CUDA-aware MPI: bytes against the staged way, order on the stream, times.

    mpirun -n 2 python -m tests.gpu.exchange.mpi_cuda             # fails unless MPI is CUDA-aware
    mpirun -n 2 python -m tests.gpu.exchange.mpi_cuda --staged    # fails if it is

Every rank checks, rank 0 reports; exits 1 if anything failed. The controls leave out the wait for
the stream, and fail where no stale bytes are seen then. Times are microseconds, the slowest rank's.
With `--device cpu` only bytes are checked (its form). Ranks may share a GPU.
"""

import argparse
import math
import statistics
import sys
import time
from contextlib import contextmanager

import torch

from tpdet.comm.device import current_device, open_world
from tpdet.comm.world import mpi_carrier
from tpdet.comm.world.group_world import GroupWorld
from tpdet.comm.world.mpi_carrier import MpiCarrier

SHAPES = ((0,), (1,), (7,), (3, 4099), (1 << 24,))  # of bytes: to 16 MB
DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64)
SIZES = {"16 KB": 1 << 14, "16 MB": 1 << 24}
SLEEP_CYCLES = 400_000_000
"""Of the kernel that goes before: some 0.2 s, for which no message takes."""


class Case:
    """A world by MPI, and a part of all its ranks that stages; what either carried from where."""

    def __init__(self, kind, staged):
        world = open_world(kind, 60.0, share_gpus=True, transport="mpi")
        assert isinstance(world, GroupWorld)
        self.world = world
        self.device = current_device(kind)
        self.staged = self.world.part([range(self.world.size)])
        self.staged._carrier._cuda = None if kind == "cpu" else False
        self.part = self.world.part([range(self.world.size)])
        self.kind = "cpu" if staged else kind  # where the world's tensors are to be sent from
        self.wanted = "mpi" if kind == "cpu" else f"mpi, {'staged' if staged else 'CUDA-aware'}"
        self.failed = False

    def say(self, name, ok, more=""):
        """Report one check of all ranks."""
        said = self.world.gather_bytes(b"ok" if ok else b"FAIL")
        self.failed = self.failed or b"FAIL" in said
        if self.world.rank == 0:
            print(f"{name}: {b' '.join(said).decode()} {more}".rstrip(), flush=True)

    def drawn(self, rank, shape, dtype):
        """What a rank has: bytes drawn from its number, as values of a dtype; on every rank."""
        generator, size = torch.Generator().manual_seed(rank), math.prod(shape) * dtype.itemsize
        flat = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
        return flat.view(dtype).view(shape)

    def check_bytes(self, shape, dtype):
        """Gathered and exchanged bytes, by each world, against what the ranks are known to have."""
        ranks, me = self.world.size, self.world.rank
        if shape[-1] == 1 << 24:
            shape = ((1 << 24) // dtype.itemsize,)
        rows = [self.drawn(rank, shape, dtype) for rank in range(ranks)]
        blocks = [self.drawn(rank, (ranks, *shape), dtype) for rank in range(ranks)]
        for world, kind in ((self.world, self.kind), (self.staged, "cpu"), (self.part, self.kind)):
            with sent_from() as seen:
                gathered = world.all_gather(rows[me].to(self.device))
                received = world.all_to_all(blocks[me].to(self.device))
            assert gathered.device == received.device == self.device
            equal = same(gathered, torch.stack(rows))
            equal = equal and same(received, torch.stack([block[me] for block in blocks]))
            if not equal or seen != [kind] * (2 if rows[me].numel() else 0):
                return False
        return True

    def written_before(self, size):
        """Whether ranks see what a kernel of the stream wrote just before, after a slow one."""
        me, ranks = self.world.rank, self.world.size
        sent = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(SLEEP_CYCLES)
            sent.fill_(me + 1)
            gathered = self.world.all_gather(sent)
        torch.cuda.synchronize()
        wanted = torch.arange(1, ranks + 1, dtype=torch.uint8).repeat_interleave(size)
        return same(gathered, wanted.view(ranks, size))

    def read_before(self, size):
        """Whether a kernel of the stream still reads what it was to from memory received into."""
        sent = torch.full((size,), 9, dtype=torch.uint8, device=self.device)
        shape = (self.world.size, size)
        copied = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            old = torch.full(shape, 5, dtype=torch.uint8, device=self.device)
            address = old.data_ptr()
            torch.cuda._sleep(SLEEP_CYCLES)
            copied.copy_(old)
            del old  # the allocator gives it to the next tensor of this size and stream
            gathered = self.world.all_gather(sent)
        torch.cuda.synchronize()
        if self.kind == "cuda" and gathered.data_ptr() != address:
            raise SystemExit("the allocator gave other memory: this check shows nothing")
        return same(copied, torch.full(shape, 5, dtype=torch.uint8)) and bool((gathered == 9).all())

    def microseconds(self, world, size, repeats=20):
        """Of one all-gather of `size` bytes, the slowest rank's."""
        sent, taken = torch.zeros(size, dtype=torch.uint8, device=self.device), []
        for _ in range(7):
            self.wait()
            begin = time.perf_counter()
            for _ in range(repeats):
                world.all_gather(sent)
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - begin) / repeats * 1e6)
        return max(map(float, self.world.gather_bytes(f"{statistics.median(taken)}".encode())))

    def wait(self):
        torch.cuda.synchronize()
        self.world.barrier()


def same(left, right):
    """Whether two tensors have the same shape, dtype and bytes."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    flat = (x.cpu().reshape(-1).view(torch.uint8) for x in (left, right))
    return torch.equal(*flat)


@contextmanager
def sent_from():
    """A list of the kinds of memory that MPI is given while inside."""
    seen, originals = [], {name: getattr(MpiCarrier, name) for name in ("all_gather", "all_to_all")}

    def noting(run):
        def carry(carrier, received, sent, timeout):
            seen.append(sent.device.type)
            return run(carrier, received, sent, timeout)

        return carry

    for name, run in originals.items():
        setattr(MpiCarrier, name, noting(run))
    try:
        yield seen
    finally:
        for name, run in originals.items():
            setattr(MpiCarrier, name, run)


@contextmanager
def no_wait_for_the_stream():
    """GPU memory goes to MPI at once while inside."""
    original = mpi_carrier._buffers
    mpi_carrier._buffers = lambda sent, received: ([sent, "B"], [received, "B"])
    try:
        yield
    finally:
        mpi_carrier._buffers = original


def check_order(case, controls):
    """Both orders at every size; with `controls` also that they can be seen to break."""
    for check in (case.written_before, case.read_before):
        for name, size in SIZES.items():
            case.say(f"{check.__name__}, {name}", check(size))
        if not controls:
            continue
        kept = []
        with no_wait_for_the_stream():
            for size in SIZES.values():
                kept.append(check(size))
        broken = b"broken" in case.world.gather_bytes(b"kept" if all(kept) else b"broken")
        case.say(f"control: {check.__name__} breaks without the wait", broken)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.exchange.mpi_cuda")
    parser.add_argument("--staged", action="store_true", help="MPI is to be one without CUDA")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    case = Case(options.device, options.staged)
    case.say(f"tensors travel by {case.world.by_mpi}", case.world.by_mpi == case.wanted)
    if case.world.by_mpi != case.wanted:
        sys.exit(f"tensors travel by {case.world.by_mpi}, wanted: {case.wanted}")
    for dtype in DTYPES:
        for shape in SHAPES:
            case.say(f"bytes, {dtype} {shape}", case.check_bytes(shape, dtype))
    if options.device == "cuda":
        check_order(case, controls=not options.staged)
        for name, size in SIZES.items():
            ways = {case.world.by_mpi: case.world, "the staged way": case.staged}
            taken = {way: case.microseconds(world, size) for way, world in ways.items()}
            if case.world.rank == 0:
                figures = ", ".join(f"{way} {value:.1f} us" for way, value in taken.items())
                print(f"all_gather of {name} a rank | {figures}", flush=True)
    case.world.close()
    sys.exit(case.failed)


if __name__ == "__main__":
    main()
