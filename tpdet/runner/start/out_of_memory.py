"""A GPU whose memory runs out during a start: one error that says what was done, and the remedy."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tpdet.config import EngineConfig
from tpdet.errors import ResourceError
from tpdet.runner.start.start_times import CHECKING, LOADING, MAKING_PAGES, TRYING, StartTimes

_LOADING = "lower --max-num-batched-tokens, end what else runs on the GPU, or use more GPUs (--tp)"
_STEPS = "lower --max-num-batched-tokens or --max-model-len, or use more GPUs (--tp)"
_PAGES = f"lower --gpu-memory-utilization or --kv-pages, {_STEPS}"
_REMEDY = {
    CHECKING: _LOADING,
    LOADING: _LOADING,
    TRYING: _STEPS,
    MAKING_PAGES: _PAGES,
}
"""What needs less memory, by what is being done."""


@contextmanager
def naming_memory(config: EngineConfig, times: StartTimes) -> Iterator[None]:
    """Raise a ResourceError in place of what CUDA and its libraries raise for a full GPU."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "out of memory" not in said:  # torch, Triton, NCCL and the driver all say so
            raise
        raise ResourceError(
            f"GPU memory ran out while {times.doing} of {config.model}{_figures(said)}: "
            f"{_REMEDY[times.doing]}"
        ) from None


def _figures(said: str) -> str:
    """The bytes in torch's message, if it has them."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", said)
    free = re.search(r"of which ([\d.]+ \w+) is free", said)
    if asked is None or free is None:
        return ""
    return f" ({asked.group(1)} more were needed, {free.group(1)} are free)"
