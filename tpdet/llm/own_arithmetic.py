"""The engine's own arithmetic, whatever the program around it has set of torch.

A trainer may call `generate` inside `torch.autocast`, or with another default type or device of
tensors. None of them holds while the engine works in its thread, so that bits and
`system_fingerprint` stay those of a program that sets nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tpdet.errors import UsageError

_KINDS = ("cpu", "cuda")


@contextmanager
def own_arithmetic() -> Iterator[None]:
    """Compute without autocast and with torch's first defaults, until the end of the block.

    Raises UsageError where this thread takes the smallest numbers for 0.
    """
    import torch

    least = float.fromhex("0x1p-1074")
    if least * 1.0 == 0.0:
        raise UsageError(
            "this thread takes the smallest numbers for 0, which changes bits: call "
            "torch.set_flush_denormal(False) first"
        )
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        for kind in _KINDS:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # not always: each call of torch pays for it
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
