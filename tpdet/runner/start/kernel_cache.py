"""The kernel cache of a rank: checked, because it is code, and then used."""

import logging

import torch

from tpdet.config import EngineConfig
from tpdet.launch.host.kernel_directory import check_caches

_log = logging.getLogger("tpdet.engine")


def open_kernel_cache(
    config: EngineConfig, contract: str, ranks: int, device: torch.device
) -> None:
    """Let Triton read kernels from `--kernel-cache`, if it is given, before it compiles any.

    contract: the strict one's id. Raises as `check_caches`.
    """
    capability = ""
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    directory = check_caches(config.kernel_cache, contract, ranks, device.type, capability)
    if directory is not None:
        from tpdet.kernels.cuda.launch.directory_cache import read_first

        read_first(directory.path)
        _log.info("kernel cache %s: %d kernels", directory.path, directory.kernels)
