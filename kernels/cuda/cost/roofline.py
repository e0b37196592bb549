"""The formula by which every time is estimated: of a tile here, of whole products by `tpdet plan`.

time      launch + norm(compute, memory) + rest
norm      the larger of both, and more where they are alike
"""

from collections.abc import Callable
from typing import Any

_LEAST = 1e-300  # zeros are divided by it


def roofline(
    launch: Any,
    compute: Any,
    memory: Any,
    rest: Any,
    sharpness: float,
    maximum: Callable[[Any, Any], Any] = max,
) -> Any:
    """The time in the unit of its parts; numbers, or arrays with numpy's maximum."""
    return launch + smooth_maximum(compute, memory, sharpness, maximum) + rest


def smooth_maximum(
    one: Any, other: Any, sharpness: float, maximum: Callable[[Any, Any], Any] = max
) -> Any:
    """The norm of order `sharpness` of two times: their maximum, and more where they are alike."""
    largest = maximum(one, other)
    scale = maximum(largest, _LEAST)
    return largest * ((one / scale) ** sharpness + (other / scale) ** sharpness) ** (1 / sharpness)
