"""Which GPUs each verification world gets: worlds that fit beside each other run at once."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Place:
    """The GPUs of one world, by the names that `CUDA_VISIBLE_DEVICES` has for them."""

    gpus: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """What a world's processes are started with; nothing on the CPU."""
        return {VISIBLE: ",".join(self.gpus)} if self.gpus else {}


def gpu_names(count: int) -> list[str]:
    """The names of the `count` GPUs that this process sees, in its order."""
    visible = os.environ.get(VISIBLE, "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[:count] if names else [str(index) for index in range(count)]


def run_placed(
    sizes: Sequence[int],
    start: Callable[[int, Place], None],
    gpus: Sequence[str],
    worlds_per_gpu: int = 1,
) -> None:
    """Call `start(index, place)` for every world; `sizes[index]` is its number of ranks.

    A world takes as many GPUs as it has ranks (all, if there are fewer), those with the fewest
    worlds first, and waits while that would put more than `worlds_per_gpu` on one. Large worlds
    start first. Without GPUs one world runs at a time. Whatever a `start` raises is raised once
    the worlds that run have ended; no other is started then.
    """
    waiting = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    if not gpus:
        for index in range(len(sizes)):
            start(index, Place(()))
        return
    load = dict.fromkeys(gpus, 0)
    running: dict[Future[None], Place] = {}
    with ThreadPoolExecutor(len(gpus) * worlds_per_gpu) as threads:
        while waiting or running:
            for index, place in _that_fit(waiting, sizes, load, worlds_per_gpu):
                running[threads.submit(start, index, place)] = place
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                for gpu in running.pop(future).gpus:
                    load[gpu] -= 1
                future.result()


def _that_fit(
    waiting: list[int], sizes: Sequence[int], load: dict[str, int], worlds_per_gpu: int
) -> Iterator[tuple[int, Place]]:
    """The worlds that may start now; takes them off `waiting` and onto `load`."""
    for index in list(waiting):
        free = [gpu for gpu in load if load[gpu] < worlds_per_gpu]
        need = min(sizes[index], len(load))
        if need > len(free):
            continue
        chosen = sorted(free, key=load.__getitem__)[:need]  # stable: the caller's order
        for gpu in chosen:
            load[gpu] += 1
        waiting.remove(index)
        yield index, Place(tuple(sorted(chosen, key=list(load).index)))
