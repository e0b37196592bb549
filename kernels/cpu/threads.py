"""Worker threads of the CPU kernels: independent pieces of one operation, run side by side.

A piece is computed by one thread from start to end in the same way whatever the number of threads,
so the bits do not depend on it. torch's own intra-operation threads are set to one.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_pool: ThreadPoolExecutor | None = None
_threads = 1


def configure(threads: int) -> None:
    """Use `threads` worker threads from now on (1: none beside the caller's)."""
    global _pool, _threads
    torch.set_num_threads(1)
    if _pool is not None:
        _pool.shutdown(wait=True)
    _threads = max(1, threads)
    _pool = ThreadPoolExecutor(_threads, "tpdet-kernel") if _threads > 1 else None


def run_pieces(pieces: int, work: Callable[[int], None], costly: bool) -> None:
    """Run `work(0) .. work(pieces - 1)`, side by side if `costly` and there are threads."""
    if _pool is None or not costly or pieces <= 1:
        for piece in range(pieces):
            work(piece)
        return
    share = -(-pieces // _threads)

    def run(first: int) -> None:
        for piece in range(first, min(first + share, pieces)):
            work(piece)

    for done in [_pool.submit(run, first) for first in range(0, pieces, share)]:
        done.result()
