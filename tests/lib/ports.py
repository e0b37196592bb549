"""Ports of this host: one for the ranks that a test starts; whether others reach a listener."""

import ipaddress
import socket

from tpdet.launch.host.listeners import Listener


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def is_loopback(listener: Listener) -> bool:
    """Whether a listener is reached by its own host only; of IPv4 written as IPv6 too."""
    found = ipaddress.ip_address(listener.address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
