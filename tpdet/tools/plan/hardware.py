"""Figures that the planner takes from data sheets or assumes, with their sources."""

from dataclasses import dataclass

from tpdet.errors import UsageError
from tpdet.kernels.cuda.hardware import KNOWN, SOLD_MEMORY

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """A GPU and its node.

    memory: bytes of the data sheet; reserved: bytes that the engine does not allocate (the driver's
    context, NCCL, library workspaces, CUDA graphs), an assumption; multiprocessors: as reported by
    the GPU; gpus: of one node, which can address each other's memory.
    """

    memory: int
    reserved: int
    multiprocessors: int
    gpus: int = 8


@dataclass(frozen=True)
class Network:
    """The network between nodes: bytes a second of each GPU's adapter, and seconds of latency.

    The default is nine tenths of the data sheet's 400 Gb/s of NDR InfiniBand, with one adapter for
    each GPU, and 5 us more than NCCL takes inside a node. These are assumptions: no two nodes were
    measured.
    """

    bytes: float = 0.9 * 400e9 / 8
    hop: float = 5e-6


HARDWARE = {
    name: Hardware(SOLD_MEMORY[gpu], 2 * GIB, gpu.multiprocessors)
    for name, gpu in KNOWN.items()
    if gpu in SOLD_MEMORY
}
"""By short name."""


def hardware_of(gpu: str) -> Hardware:
    """The hardware of a GPU such as "h200". Raises UsageError naming the known GPUs."""
    if gpu not in HARDWARE:
        raise UsageError(
            f"--gpu {gpu}: the times that plans are made of were measured on "
            f"{', '.join(HARDWARE)} alone: use that; tpdet itself runs on others too"
        )
    return HARDWARE[gpu]
