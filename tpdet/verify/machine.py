"""Which machine a world ran on, for results files and their names."""

import torch

from tpdet.comm.device import driver_version, ranks_per_gpu, resolve_device
from tpdet.verify.spec import Machine


def machine(device: str, ranks: int) -> Machine:
    """Where this process, one of `ranks` of one host, computes."""
    if resolve_device(device) == "cpu":
        return Machine()
    return Machine(
        gpu=torch.cuda.get_device_name(),
        gpus=-(-ranks // ranks_per_gpu()),
        driver=driver_version(),
    )
