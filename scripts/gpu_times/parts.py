"""How a program of times begins: its arguments, the GPU's name; on several ranks, their world."""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import triton

from tests.gpu.lib import ranks
from tests.gpu.lib.checks import ended
from tpdet.comm.device import open_world
from tpdet.comm.world.world import World


def run_parts(name: str, parts: dict[str, Callable[[], object]], arguments: Sequence[str]) -> int:
    """Run the parts of `python -m scripts.gpu_times.<name> [part ...]`, all unless some are named.

    name: with its folder, as `kernels.gemm`. The result is the exit status, 1 where a part failed.
    """
    parser = _parser(name)
    parser.add_argument("parts", nargs="*", default=list(parts), help=" ".join(parts))
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(parts):
        parser.error(f"there is no part {sorted(unknown)}")
    print(torch.cuda.get_device_name(), torch.__version__, "triton", triton.__version__, flush=True)
    begin = time.time()
    for part, run in parts.items():
        if part in options.parts:
            run()
            print(f"{part}: {time.time() - begin:.0f} s", flush=True)
    return ended()


def on_ranks(name: str, print_times: Callable[[World], object], arguments: Sequence[str]) -> int:
    """Run what takes times on every rank of torchrun's world; 1 where one failed."""
    no_parts(name, arguments)
    world = open_world("cuda", 120.0)
    good = ranks.attempt(world, "times", print_times)
    world.close()
    return int(not good)


def no_parts(name: str, arguments: Sequence[str]) -> None:
    """Refuse arguments of a program that takes none, and print its help."""
    _parser(name).parse_args(arguments)


def _parser(name: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"python -m scripts.gpu_times.{name}", allow_abbrev=False)
