"""The GPU that kernel benchmarks run on, and random operands on it."""

import torch

from tpdet.comm.device import driver_version, resolve_device
from tpdet.errors import UsageError
from tpdet.tools.worlds.machine import Machine


def gpu_only(bench: str) -> None:
    """Raises UsageError on a machine without a GPU that the kernels run on."""
    try:
        resolve_device("cuda")
    except UsageError as error:
        raise UsageError(
            f"tpdet bench {bench} times GPU kernels and there is none to use here: run it on a "
            f"machine with a GPU ({error})"
        ) from error


def this_gpu() -> Machine:
    """One GPU, this process's."""
    return Machine(gpu=torch.cuda.get_device_name(), gpus=1, driver=driver_version())


def random_values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values on the current GPU, the same for the same seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)
