"""Addresses that a server listens on, as settings name them."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, an IPv6 host in brackets. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{text!r} is no HOST:PORT: give one such as 127.0.0.1:8001")
    return host.removeprefix("[").removesuffix("]"), int(port)
