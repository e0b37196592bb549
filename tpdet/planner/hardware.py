"""What the planner takes from data sheets or assumes, not having been measured; with sources."""

from dataclasses import dataclass

from tpdet.errors import UsageError
from tpdet.kernels.cuda.hardware import H200

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """A GPU and its node.

    memory: bytes, as the data sheet says; reserved: bytes beside what the engine allocates (the
    driver's context, NCCL, library workspaces, CUDA graphs), an assumption; multiprocessors: as
    the GPU reports; gpus: of one node, which address each other's memory.
    """

    memory: int
    reserved: int
    multiprocessors: int
    gpus: int = 8


@dataclass(frozen=True)
class Network:
    """Between nodes: bytes a second of each GPU's own adapter, and seconds of a way through it.

    The default is the data sheet's 400 Gb/s of NDR InfiniBand, one adapter a GPU, at nine tenths,
    and 5 us on top of what NCCL takes inside a node. An assumption: two nodes were not measured.
    """

    bytes: float = 0.9 * 400e9 / 8
    hop: float = 5e-6


HARDWARE = {"h200": Hardware(141_000_000_000, 2 * GIB, H200.multiprocessors)}
"""By short name. H200: 141 GB (data sheet)."""


def hardware_of(gpu: str) -> Hardware:
    """Raises UsageError naming the GPUs there are."""
    if gpu not in HARDWARE:
        raise UsageError(
            f"--gpu {gpu}: no times of it were measured: use one of {', '.join(HARDWARE)}"
        )
    return HARDWARE[gpu]
