"""Logs for tests: a key, stores and writers that sign with it."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tpdet.audit.log.checkpoint import NoteKey
from tpdet.audit.log.disk import Disk
from tpdet.audit.log.reader import LogReader
from tpdet.audit.log.store import LogStore
from tpdet.audit.log.writer import AuditLog

ORIGIN = "example.com/log"
SECRET = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEY = NoteKey(ORIGIN, SECRET.public_key().public_bytes_raw())
IN_MEMORY = Path("/var/log/answers")
"""A directory on a simulated disk."""


def open_store(disk: Disk | None = None, directory: Path = IN_MEMORY) -> LogStore:
    return LogStore(directory, SECRET.sign, ORIGIN, KEY, disk=disk)


def open_log(directory: Path, disk: Disk | None = None, **options) -> AuditLog:
    options = {"publish_seconds": None, **options}
    return AuditLog(directory, SECRET.sign, ORIGIN, KEY.name, KEY.public, disk=disk, **options)


def read_log(directory: Path = IN_MEMORY, disk: Disk | None = None) -> LogReader:
    return LogReader(directory, [KEY], disk)


def leaves_of(begin: int, end: int) -> list[bytes]:
    """Leaves that tell their index."""
    return [b"leaf %d " % index + b"x" * (index % 50) for index in range(begin, end)]
