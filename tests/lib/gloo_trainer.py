"""A trainer in a process of its own that broadcasts weights as clients of SGLang and vLLM do.

It makes the group by torch's own functions.
"""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.lib.forked import forking

GROUP_NAME = "0"
"""What torch calls a process's first group; SGLang's wrapper lets a group have any name."""


def join_group(port: int, world: int) -> None:
    """Make the group of this process, as rank 0, over a store that is named for the group too."""
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, world, True, timeout)
    named = dist.PrefixStore(GROUP_NAME, store)
    dist.init_process_group("gloo", store=named, rank=0, world_size=world, timeout=timeout)


def send(tensors: list[torch.Tensor], die_after: int) -> None:
    """Broadcast each; die where that is asked for."""
    for number, tensor in enumerate(tensors):
        if number == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.broadcast(tensor, 0)


def packed(tensors: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """The tensors joined as vLLM's producer does: until there are more than `size` bytes."""
    joined, parts = [], []
    for tensor in tensors:
        parts.append(tensor.contiguous().view(torch.uint8).view(-1))
        if sum(part.numel() for part in parts) > size:
            joined.append(torch.cat(parts))
            parts = []
    return [*joined, torch.cat(parts)] if parts else joined


def start_trainer(path, port, world, names, packed=0, die_after=-1):
    """A process of `run_trainer`, to which the arguments go."""
    arguments = path, port, world, packed, die_after, names
    process = forking().Process(target=run_trainer, args=arguments, daemon=True)
    process.start()
    return process


def run_trainer(path, port, world, size, die_after, names) -> None:
    """Send tensors of a file. size 0: one broadcast a tensor; else the bytes of a chunk.

    After `die_after` broadcasts it kills itself, unless that is negative.
    """
    tensors = load_file(path)
    chosen = [tensors[name] for name in names]
    join_group(port, world)
    send(packed(chosen, size) if size else chosen, die_after)
    os._exit(0)
