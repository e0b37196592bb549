"""Sizes of grids and blocks on the host, in plain integers.

Triton's functions of these names serve kernels too and take ten times as long on the host, where
every launch calls two or three of them.
"""


def cdiv(length: int, size: int) -> int:
    """How many blocks of `size` cover `length`."""
    return -(-length // size)


def next_power_of_2(value: int) -> int:
    """The least power of two that is `value` or more; 1 for 1 and less."""
    return 1 << max(0, value - 1).bit_length()
