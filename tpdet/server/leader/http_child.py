"""Rank 0's handle on an HTTP process: its port, its start, its end."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from tpdet.errors import ResourceError, UsageError
from tpdet.launch.host.interpreter import python_command, python_environment
from tpdet.server.wire.process_config import ProcessConfig

BACKLOG = 2048


def bind_port(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A bound socket that does not listen yet. Raises ResourceError, naming `flag`, if taken."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        named = "--host" if flag == "--port" else flag
        raise UsageError(f"{named} {host} is no address of this machine: {error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    # Else a port stays closed for a minute after a server that had open connections.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except PermissionError as error:
        listener.close()
        raise ResourceError(f"port {port} needs privileges: choose one above 1023") from error
    except OSError as error:
        listener.close()
        raise _taken(host, port, error, flag) from error
    return listener


@contextmanager
def listening_file(path: str) -> Iterator[socket.socket]:
    """A Unix socket at a path, of mode 0600, that listens; this process's end of it is closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        yield listener


def listen(listener: socket.socket, flag: str = "--port") -> None:
    """Open the port. Raises ResourceError if another server was faster."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _taken(host, port, error, flag) from error


def url_of(listener: socket.socket) -> str:
    """The URL a client on this machine can use."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _taken(host: str, port: int, error: OSError, flag: str) -> ResourceError:
    return ResourceError(
        f"{host}:{port} cannot be listened on ({os.strerror(error.errno or 0)}): stop what uses "
        f"it, or choose another {flag} (0 takes a free one)"
    )


class HttpProcess:
    """A process, started at once. Its standard input stays open as long as this one lives."""

    def __init__(self, config: ProcessConfig) -> None:
        inherited = [config.socket, config.admin_socket, config.tallies]
        inherited += [] if config.audit is None else config.audit.sockets
        inherited += [] if config.batches is None else [config.batches.socket]
        self._process = subprocess.Popen(
            python_command("-m", "tpdet.server.front.process"),
            stdin=subprocess.PIPE,
            pass_fds=[fd for fd in inherited if fd >= 0],
            env=python_environment() | {"PYTHONUNBUFFERED": "1"},
        )
        assert self._process.stdin is not None
        # A process that ended at once is noticed by `exit_code`, not here.
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """What it ended with, None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within `seconds`."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def kill(self) -> None:
        """End it now, and collect it."""
        self._process.kill()
        self._process.wait()
