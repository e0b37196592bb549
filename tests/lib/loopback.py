"""Whether a listener is reached by its own host only."""

import ipaddress

from tpdet.launch.host.listeners import Listener


def is_loopback(listener: Listener) -> bool:
    """Also of an IPv4 address that is written as an IPv6 one."""
    found = ipaddress.ip_address(listener.address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
