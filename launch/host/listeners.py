"""Which sockets of the network a process listens on, read from /proc."""

import ipaddress
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TABLES = ("tcp", "tcp6", "udp", "udp6")
_TCP_LISTEN, _UDP_UNCONNECTED = "0A", "07"


@dataclass(frozen=True, order=True)
class Listener:
    """A socket that listens on `address` and `port`; `protocol` is "tcp" or "udp"."""

    protocol: str
    address: str
    port: int

    @property
    def everywhere(self) -> bool:
        """Whether it listens on every address of the host."""
        return ipaddress.ip_address(self.address).is_unspecified


def listeners(pid: int) -> list[Listener]:
    """The listening sockets that a process of this host holds, in order; [] if /proc hides them."""
    sockets = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    listening = set()
    for table in _TABLES:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                state = _TCP_LISTEN if table.startswith("tcp") else _UDP_UNCONNECTED
                if fields[3] == state and f"socket:[{fields[9]}]" in sockets:
                    address, _, port = fields[1].rpartition(":")
                    listening.add(Listener(table[:3], _address(address), int(port, 16)))
    return sorted(listening)


def _address(text: str) -> str:
    """An address as /proc writes it: 32-bit words in the host's byte order, here little-endian."""
    words = [bytes.fromhex(text[begin : begin + 8])[::-1] for begin in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
