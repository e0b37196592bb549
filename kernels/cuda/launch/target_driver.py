"""As much of Triton's driver as compiling takes: nothing is launched, and no GPU is touched."""

from triton.backends.compiler import GPUTarget


class TargetDriver:
    """Says what to compile for; `recording.has_gpu` is False with it."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Nothing is launched on it."""
        return 0
