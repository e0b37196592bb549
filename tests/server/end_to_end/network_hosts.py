"""Two network namespaces as two hosts, with a router between them that can swallow every packet.

A host has a host name, addresses and ports of its own; its processes meet those of the other only
through the router, a third namespace. While the network is cut, the router drops what either host
sends, silently: no reset, no ICMP message and no lost carrier tells anybody, as when a switch
between two racks dies.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CLONE_NEWNET = 0x40000000
_ENTER = """
mount --bind "$1" /etc/hosts && echo "$2" >/proc/sys/kernel/hostname && shift 2 && exec "$@"
"""


class NoNamespacesError(Exception):
    """Network namespaces cannot be made here; the message says why."""


class NetworkHosts:
    """Two hosts, 0 and 1, and what is between them; `close` kills who still runs on them."""

    def __init__(self, folder: Path) -> None:
        """folder: for the file of host names. Raises NoNamespacesError."""
        if os.geteuid() != 0:
            raise NoNamespacesError("network namespaces need root")
        _remove_left_over()
        stem = f"tpdet-{os.getpid()}"
        self.names, self._router = (f"{stem}-0", f"{stem}-1"), f"{stem}-router"
        self.addresses = ("10.93.0.2", "10.93.1.2")
        self._hosts_file = folder / "hosts"
        lines = [
            "127.0.0.1 localhost",
            *map(" ".join, zip(self.addresses, self.names, strict=True)),
        ]
        self._hosts_file.write_text("\n".join(lines) + "\n")
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name in (*self.names, self._router):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port, gateway = f"host{index}", f"10.93.{index}.1"
            ip(
                "-n",
                name,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                port,
                "netns",
                self._router,
            )
            for space, link, own in ((name, "eth0", address), (self._router, port, gateway)):
                ip("-n", space, "address", "add", f"{own}/24", "dev", link)
                ip("-n", space, "link", "set", link, "up")
            ip("-n", name, "route", "add", "default", "via", gateway)
        forward = "echo 1 >/proc/sys/net/ipv4/ip_forward"
        ip("netns", "exec", self._router, "sh", "-c", forward)
        check = "echo x >/proc/sys/kernel/hostname"
        ip("netns", "exec", self._router, "unshare", "--uts", "sh", "-c", check)

    def command(self, index: int, command: list[str]) -> list[str]:
        """What runs `command` on a host, in the process that is started (exec, no fork)."""
        place = [_program(), "netns", "exec", self.names[index], "unshare", "--uts"]
        return [
            *place,
            "sh",
            "-ec",
            _ENTER,
            "sh",
            str(self._hosts_file),
            self.names[index],
            *command,
        ]

    def cut(self) -> None:
        """From now on no packet of one host reaches the other."""
        for address in self.addresses:
            ip("-n", self._router, "route", "add", "blackhole", f"{address}/32")

    def heal(self) -> None:
        """Packets pass, again or still."""
        ip("-n", self._router, "route", "flush", "type", "blackhole")

    def clients(self, index: int, count: int) -> ThreadPoolExecutor:
        """Threads whose sockets, and those of the threads they start, are a host's."""
        return ThreadPoolExecutor(count, initializer=_enter, initargs=(self.names[index],))

    def processes(self, index: int) -> list[int]:
        """Who runs on a host."""
        return _processes(self.names[index])

    def kill(self, index: int) -> None:
        """SIGKILL for everybody on a host; the kernel resets their connections, unless cut."""
        _kill(self.names[index])

    def close(self) -> None:
        """Kill everybody on both hosts; remove the namespaces."""
        for name in (*self.names, self._router):
            _remove(name)


def ip(*arguments: str) -> str:
    """The output of iproute2's `ip`. Raises NoNamespacesError with what it said."""
    try:
        done = subprocess.run(
            [_program(), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except FileNotFoundError as error:
        raise NoNamespacesError("no `ip`: apt-get install iproute2") from error
    if done.returncode != 0:
        raise NoNamespacesError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _program() -> str:
    return shutil.which("ip", path=_PATH) or "ip"


def _enter(name: str) -> None:
    """Move the calling thread, alone, into a namespace (os.setns is Python 3.12's)."""
    library = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as space:
        if library.setns(space.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns into {name}")


def _processes(name: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", name).split()]


def _kill(name: str) -> None:
    deadline = time.monotonic() + 10
    while (found := _processes(name)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _remove(name: str) -> None:
    if name in ip("netns", "list").split():
        _kill(name)
        ip("netns", "delete", name)


def _remove_left_over() -> None:
    """Namespaces of test runs that were killed: their name holds the pid of who made them."""
    for name in re.findall(r"^tpdet-\d+-\w+", ip("netns", "list"), re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            _remove(name)
