"""Tensors broadcast by gloo: a trainer on any machine, on CPUs as well.

The trainer makes a group by torch's TCP rendezvous, as SGLang's clients do (`group_name`); a
process of each rank of the server joins it (`gloo_receiver.py`).
"""

import mmap
import os
import socket
import subprocess
from threading import Lock

import msgspec
import torch

from tpdet.checkpoint.transfer.carriers import BroadcastCarrier, Tick, wait_ticking
from tpdet.checkpoint.transfer.gloo_receiver import DONE, MOST_BYTES, Group
from tpdet.control.weight_orders import CarrierInfo
from tpdet.errors import WeightUpdateError
from tpdet.launch.host.interpreter import python_command, python_environment

_UNSENT, _LEAST = 0xFF, 2
"""A byte of what did not come, and the bytes of the smallest numbers: so many of it are NaN, and
the end of NaN in wider ones."""


class GlooCarrier(BroadcastCarrier):
    """One rank's place in a trainer's gloo group, which a process of its own holds.

    gloo takes fewer bytes than are expected without a word, so memory is filled with a byte that
    ends no number first; and it ends the process that is sent more, which is not this one.
    """

    def __init__(self, info: CarrierInfo, rank: int, timeout: float, tick: Tick) -> None:
        """Join the group; returns when all its ranks are there. Raises WeightUpdateError (502)."""
        super().__init__(info, torch.device("cpu"))
        self._timeout, self._size = timeout, 0
        self._memory = os.memfd_create("tpdet-weights")
        self._connection = _receivers.connect(self._memory)
        where = f"gloo group at {info.master_address}:{info.master_port}"
        try:
            group = msgspec.json.encode(Group(info, info.rank_offset + rank, timeout))
            message = self._ask(group, tick, where)
            if message != DONE:
                raise WeightUpdateError(f"{where}: {_text(message)}", 502)
        except BaseException:
            self.close()
            raise

    def _broadcast(self, values: torch.Tensor, tick: Tick) -> None:
        size = values.nbytes
        if self._memory < 0:
            raise WeightUpdateError("the sender's group is closed: init it again", 409)
        if size > self._size:
            os.ftruncate(self._memory, size)
            self._size = size
        with mmap.mmap(self._memory, size) as mapped:
            received = torch.frombuffer(mapped, dtype=torch.uint8)
            try:
                received.fill_(_UNSENT)
                message = self._ask(b"%d" % size, tick, "the sender is gone")
                if message not in (DONE, b""):
                    raise WeightUpdateError(f"the sender is gone: {_text(message)}", 502)
                if not message or bool((received[-_LEAST:] == _UNSENT).all()):
                    raise WeightUpdateError(
                        f"the sender has not sent the {size} bytes that it announced, but "
                        f"{'fewer, or NaN at their end' if message else 'more'}: are dtypes and "
                        "shapes those of its tensors?"
                    )
                values.view(-1).view(torch.uint8).copy_(received)
            finally:
                del received

    def _ask(self, message: bytes, tick: Tick, what: str) -> bytes:
        """What the receiver answers; nothing where it has ended."""
        connection = self._connection

        def ask() -> bytes:
            try:
                connection.send(message)
                return connection.recv(MOST_BYTES)
            except (BrokenPipeError, ConnectionResetError):
                return b""

        return wait_ticking(ask, tick, what, self._timeout)

    def close(self) -> None:
        """Leave the group: its receiver ends."""
        if self._memory >= 0:
            self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            os.close(self._memory)
            self._memory = -1


class _Receivers:
    """The process that makes receivers; it is started for the first, and ends with this one."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._control: socket.socket | None = None

    def connect(self, memory: int) -> socket.socket:
        """The connection to a new receiver, which has `memory`, a descriptor."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._turn:
            try:
                self._send([theirs.fileno(), memory])
            except (BrokenPipeError, ConnectionResetError):  # somebody has ended it
                self._control = None
                self._send([theirs.fileno(), memory])
        return ours

    def _send(self, descriptors: list[int]) -> None:
        if self._control is None:
            self._control = _start()
        socket.send_fds(self._control, [b"+"], descriptors)


def _start() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            python_command("-m", "tpdet.checkpoint.transfer.gloo_receiver", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=python_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
    return ours


def _text(message: bytes) -> str:
    return message.decode(errors="replace") or "its receiver has ended"


_receivers = _Receivers()
