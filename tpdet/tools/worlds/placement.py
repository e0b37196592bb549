"""Assigns GPUs to verification worlds; worlds that fit beside each other run together."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Place:
    """The GPUs of one world, by their names in `CUDA_VISIBLE_DEVICES`."""

    gpus: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a world's processes; none on the CPU."""
        return {VISIBLE: ",".join(self.gpus)} if self.gpus else {}


def gpu_names(count: int) -> list[str]:
    """The names of the `count` GPUs that this process sees, in order."""
    visible = os.environ.get(VISIBLE, "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[:count] if names else [str(index) for index in range(count)]


def run_placed(
    sizes: Sequence[int],
    start: Callable[[int, Place], None],
    gpus: Sequence[str],
    worlds_per_gpu: int = 1,
    needs: Sequence[int] = (),
    memory: int = 0,
) -> None:
    """Call `start(index, its place)` for every world; `sizes[index]` is its number of ranks.

    A world gets one GPU for each rank (all GPUs, if there are fewer), those with the fewest worlds
    first. It waits while a GPU would have more than `worlds_per_gpu`, or, with `needs`, other
    worlds and too few bytes: `needs[index]` of `memory`. Large worlds start first. Without GPUs one
    world runs at a time. After an error of `start` no other world is started; the error is raised
    once the running worlds have ended.
    """
    waiting = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    if not gpus:
        for index in range(len(sizes)):
            start(index, Place(()))
        return
    load: dict[str, list[int]] = {gpu: [] for gpu in gpus}
    running: dict[Future[None], tuple[int, Place]] = {}
    with ThreadPoolExecutor(len(gpus) * worlds_per_gpu) as threads:
        while waiting or running:
            for index, chosen in _that_fit(waiting, sizes, load, worlds_per_gpu, needs, memory):
                running[threads.submit(start, index, chosen)] = index, chosen
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                index, chosen = running.pop(future)
                for gpu in chosen.gpus:
                    load[gpu].remove(index)
                future.result()


def _that_fit(
    waiting: list[int],
    sizes: Sequence[int],
    load: dict[str, list[int]],
    worlds_per_gpu: int,
    needs: Sequence[int],
    memory: int,
) -> Iterator[tuple[int, Place]]:
    """The worlds that may start now; moves them from `waiting` into `load`."""

    def takes(worlds: list[int], index: int) -> bool:
        needed = sum(needs[world] for world in (*worlds, index)) if needs and worlds else 0
        return len(worlds) < worlds_per_gpu and needed <= memory

    for index in list(waiting):
        free = [gpu for gpu in load if takes(load[gpu], index)]
        need = min(sizes[index], len(load))
        if need > len(free):
            continue
        # A stable sort keeps the caller's order.
        chosen = sorted(free, key=lambda gpu: len(load[gpu]))[:need]
        for gpu in chosen:
            load[gpu].append(index)
        waiting.remove(index)
        yield index, Place(tuple(sorted(chosen, key=list(load).index)))
