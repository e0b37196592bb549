"""A port for the ranks that a test starts."""

import socket


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
