"""What the CUDA graphs of an engine share: input buffers, a stream to capture on, and memory."""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """A step that was captured."""

    def replay(self) -> None:
        """Launch it again, on the current stream, over what its buffers hold then."""


class PackedBuffer:
    """A packed buffer on the device, and two on the host that take turns to be copied to it.

    A graph has read the buffer when the next copy to it begins: all is in one stream.
    """

    def __init__(self, device: torch.device, words: int) -> None:
        """words: int32 values that it holds."""
        self._gpu = device.type == "cuda"
        self.packed = torch.zeros(words, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(words, dtype=torch.int32) for _ in range(2)]
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0
        if self._gpu:
            self._hosts = [host.pin_memory() for host in self._hosts]
            self._copied = [torch.cuda.Event() for _ in self._hosts]

    def fill(self, words: int, pack: Callable[[torch.Tensor], None]) -> None:
        """Let `pack` write int32 [words] on the host, and begin to copy them to the device."""
        self._turn = 1 - self._turn
        host = self._hosts[self._turn][:words]
        if self._gpu:
            self._copied[self._turn].synchronize()  # the last copy out of this buffer is done
        pack(host)
        self.packed[:words].copy_(host, non_blocking=True)
        if self._gpu:
            self._copied[self._turn].record()


class GraphRoom(PackedBuffer):
    """The buffer that steps are packed in; stream and memory of the graphs that read it.

    Graphs of one room use the same memory, so capture the largest first; none is to be captured
    once those before it are gone.
    """

    def __init__(self, device: torch.device, words: int) -> None:
        """words: int32 values of the largest step."""
        super().__init__(device, words)
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def capture(self, step: Callable[[], None], first: Callable[[], None]) -> Graph:
        """`step` as a graph. `first` runs before: libraries and kernels load what `step` needs."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.packed.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            first()
            self._stream.synchronize()
            if self._pool is None:
                # `torch.cuda.graph` does so each time, and `first` takes the memory anew each time.
                torch.cuda.empty_cache()
                self._pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        return graph
