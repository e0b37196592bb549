"""The socket of the store where ranks meet, bound to one address of rank 0's host.

A store that torch opens itself listens on every address, and trusts everybody who reaches it.
"""

import errno
import ipaddress
import logging
import socket

_log = logging.getLogger("tpdet.engine")


def store_listener(address: str, port: int) -> int | None:
    """The descriptor of a socket bound to `address` (a host name or an IP address) and `port`.

    None if other hosts do not reach this host by that address: it is a proxy's, or a name that
    means the loopback interface here (Debian gives a host's own name 127.0.1.1). The store then
    has to listen on every address, and the log says so. Raises OSError if the port is taken.
    """
    literal = _is_literal(address)
    try:
        addresses = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        addresses = []
    for family, kind, _, _, socket_address in addresses:
        if not literal and ipaddress.ip_address(socket_address[0]).is_loopback:
            continue
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(socket_address)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            raise
        return listener.detach()
    _log.warning(
        "MASTER_ADDR %s is no address of rank 0's host that other hosts could reach, so the store "
        "where ranks meet listens on every address, port %d: set MASTER_ADDR to the number of rank "
        "0's host on the cluster's private interface, on every rank, or keep the port from others",
        address,
        port,
    )
    return None


def _is_literal(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
