"""The device of a rank: the CPU, or the GPU that belongs to its local rank."""

import importlib.util
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tpdet.comm.world.distributed import START_TIMEOUT, DistributedWorld
from tpdet.comm.world.world import SoloWorld, World
from tpdet.errors import UsageError
from tpdet.launch.ranks.environment import RankEnvironment, read_environment

MIN_CAPABILITY = (8, 0)

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def resolve_device(wanted: str) -> str:
    """The kind of device, "cpu" or "cuda". `wanted` "auto" takes a GPU if torch sees one.

    Raises UsageError for a GPU that is missing or too old, and where Triton is missing.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = "sees no GPU" if built else "is built without CUDA"
        raise UsageError(
            f"device cuda: torch {torch.__version__} {reason}: use --device cpu, or install "
            "torch for CUDA and check nvidia-smi"
        )
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < MIN_CAPABILITY:
            raise UsageError(
                f"device cuda: {torch.cuda.get_device_name(index)} has compute capability "
                f"{capability[0]}.{capability[1]}, the kernels need 8.0: use --device cpu, or hide "
                "it with CUDA_VISIBLE_DEVICES"
            )
    if importlib.util.find_spec("triton") is None:
        raise UsageError("device cuda needs Triton: install it, or use --device cpu")
    return "cuda"


def ranks_per_gpu(environment: RankEnvironment | None = None) -> int:
    """How many of this host's ranks share a GPU; 1 where each has its own."""
    local = (environment or read_environment()).local_size
    return -(-local // max(1, torch.cuda.device_count()))


def open_world(
    device: str,
    timeout: float,
    environment: RankEnvironment | None = None,
    share_gpus: bool = False,
    transport: str = "auto",
    start_timeout: float = START_TIMEOUT,
    watch: Callable[[], None] | None = None,
) -> World:
    """The world that the launcher's environment describes; makes this rank's GPU the current one.

    device: as for `resolve_device`. timeout: seconds of each operation. share_gpus: let neighbours
    share a GPU where there are fewer GPUs than ranks, instead of refusing (UsageError); tensors
    then travel through host memory. transport: "mpi" sends tensors by MPI. start_timeout: seconds
    within which all ranks have to arrive. watch: as for `DistributedWorld`. Raises as that.
    """
    environment = environment or read_environment()
    device = resolve_ranks_device(device, environment, share_gpus)
    staged = False
    if device == "cuda":
        together = ranks_per_gpu(environment)
        staged = together > 1
        torch.cuda.set_device(environment.local_rank // together)
    if environment.size == 1:
        return SoloWorld()
    return DistributedWorld(
        device,
        timeout,
        start_timeout,
        environment=environment,
        staged=staged,
        mpi=transport == "mpi",
        watch=watch,
    )


def resolve_ranks_device(
    wanted: str, environment: RankEnvironment, share_gpus: bool = False
) -> str:
    """As `resolve_device`; refuses (UsageError) ranks that share a GPU, unless they may."""
    device = resolve_device(wanted)
    if device == "cuda" and ranks_per_gpu(environment) > 1 and not share_gpus:
        raise UsageError(
            f"{environment.local_size} ranks on a host with {torch.cuda.device_count()} GPUs: "
            "start as many ranks as there are GPUs, or use --device cpu"
        )
    return device


def current_device(kind: str) -> torch.device:
    """The torch device of this rank for "cpu" or "cuda"."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )


def free_gpu_bytes(utilization: float) -> int:
    """Bytes of GPU memory that this rank may still take.

    utilization: the share of the whole memory that may be used; the rest stays free. Ranks on one
    GPU divide what is free. Memory that torch's allocator holds counts as taken.
    """
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return max(0, free - int((1.0 - utilization) * total)) // ranks_per_gpu()


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU, named by its id: free to every process, and all of them."""

    gpu: str
    free: int
    total: int


def gpu_memory() -> GpuMemory:
    """This rank's GPU memory, once torch's allocator has given back what it holds unused."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    identity = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return GpuMemory(str(identity), free, total)


def gpu_bytes(device: torch.device) -> int:
    """Memory of a GPU, divided among the ranks that share it; 0 of a CPU."""
    if device.type != "cuda":
        return 0
    memory: int = torch.cuda.get_device_properties(device).total_memory
    return memory // ranks_per_gpu()


def driver_version() -> str | None:
    """NVIDIA's driver, such as "580.159.04"; None if it cannot be read."""
    try:
        text = DRIVER_FILE.read_text()
    except OSError:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
    found = re.search(r"\d{3}\.\d+(?:\.\d+)?", text)
    return found.group() if found else None


def gpu_facts() -> dict[str, str]:
    """Facts of the GPU and its libraries that may change a bit, for the start-up agreement."""
    flags = {
        "matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn.enabled": torch.backends.cudnn.enabled,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "bf16 reduced precision": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16 reduced precision": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    }
    major, minor = torch.cuda.get_device_capability()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "gpu capability": f"{major}.{minor}",
        "gpu multiprocessors": str(properties.multi_processor_count),
        "gpu driver": str(driver_version()),
        "cudnn": str(torch.backends.cudnn.version()),
    }
    return facts | {f"flag {name}": str(value) for name, value in flags.items()}
