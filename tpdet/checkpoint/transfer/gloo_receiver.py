"""A process for each sender's gloo group: gloo ends the process that is sent more than it expects.

    python -m tpdet.checkpoint.transfer.gloo_receiver FD

imports torch once and becomes, by a fork, the receiver of each group that it is asked for. FD is a
socket over which the two descriptors of a receiver come: its connection, and memory for tensors.
Over the connection go `Group` as JSON, then the bytes of one broadcast after the other; each is
answered by "done", or by what is wrong. Whoever closes a connection ends its receiver.
"""

import mmap
import os
import resource
import select
import signal
import socket
import sys
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread

import msgspec
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions

from tpdet.control.weight_orders import CarrierInfo

GROUP_NAME = "weight_update_group"
"""The name of a group for which none is given."""
DONE = b"done"
MOST_BYTES = 1 << 16
"""A message is no longer than this."""
_LOOK_SECONDS = 0.05
"""A receiver looks so often whether it is still wanted."""


class Group(msgspec.Struct, frozen=True):
    """The group that a receiver joins, as `rank` of it; timeout: seconds of silence."""

    info: CarrierInfo
    rank: int
    timeout: float


class Receiver:
    """One rank of a sender's group; its answers go over the connection."""

    def __init__(self, connection: socket.socket, memory: int) -> None:
        """memory: the descriptor of memory that is at least as large as what is received."""
        self._connection, self._memory = connection, memory
        self._group: ProcessGroupGloo | None = None

    def run(self) -> None:
        """Obey until the connection is closed."""
        while message := self._connection.recv(MOST_BYTES):
            done: Future[None] = Future()
            Thread(target=self._obey, args=(message, done), daemon=True).start()
            while not done.done():
                self._look(done)
            error = done.exception()
            answer = DONE if error is None else (str(error) or type(error).__name__).encode()
            self._connection.send(answer[:MOST_BYTES])

    def _look(self, done: "Future[None]") -> None:
        """Wait a moment for the work, and end this process if nobody wants it any more."""
        try:
            done.exception(_LOOK_SECONDS)
        except TimeoutError:
            readable, _, _ = select.select([self._connection], [], [], 0)
            if readable and not self._connection.recv(1, socket.MSG_PEEK):
                os._exit(0)

    def _obey(self, message: bytes, done: "Future[None]") -> None:
        try:
            if self._group is None:
                self._group = _join(msgspec.json.decode(message, type=Group))
            else:
                self._receive(self._group, int(message))
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    def _receive(self, group: ProcessGroupGloo, size: int) -> None:
        """A broadcast of so many bytes into the memory."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with mmap.mmap(self._memory, size) as mapped:
            received = torch.frombuffer(mapped, dtype=torch.uint8)
            try:
                group.broadcast([received], options).wait()  # type: ignore[attr-defined]
            finally:
                del received


def _join(group: Group) -> ProcessGroupGloo:
    """The group by the keys that torch's `init_process_group` and SGLang's wrapper use."""
    info, timeout = group.info, timedelta(seconds=group.timeout)
    store = TCPStore(info.master_address, info.master_port, info.world_size, False, timeout)
    name = info.group_name or GROUP_NAME
    named = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return ProcessGroupGloo(named, group.rank, info.world_size, timeout)


def main(control: socket.socket) -> None:
    """Make receivers until `control` is closed; in each of them, return when it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are collected by themselves
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        control.close()
        Receiver(socket.socket(fileno=descriptors[0]), descriptors[1]).run()
        os._exit(0)  # without waiting for a thread of gloo


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
