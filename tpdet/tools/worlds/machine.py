"""Describes the machine of a world, for results files and their names."""

import os

import msgspec
import torch

from tpdet.comm.device import driver_version, ranks_per_gpu, resolve_device
from tpdet.comm.world.world import World


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of a world: "cpu", or the GPU's name, the number of GPUs, and the driver."""

    gpu: str = "cpu"
    gpus: int = 0
    driver: str | None = None


def machine(device: str, ranks: int) -> Machine:
    """The machine of this process, one of `ranks` on one host."""
    if resolve_device(device) == "cpu":
        return Machine()
    return Machine(
        gpu=torch.cuda.get_device_name(), gpus=-(-ranks // ranks_per_gpu()), driver=driver_version()
    )


def count_gpus(world: World) -> int:
    """How many different GPUs all ranks have together; 0 on the CPU. Collective."""
    here = ""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        here = f"{os.uname().nodename} {device.uuid}"
    return len({gpu for gpu in world.gather_bytes(here.encode()) if gpu})
