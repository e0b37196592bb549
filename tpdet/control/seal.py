"""Sealed messages: each carries its number and a MAC, under a key that both ends hold.

    MAC (32 bytes) | number (u64, little endian, from 0) | payload

The MAC is BLAKE3's keyed mode (section 2.4 of its paper) over number and payload. A receiver MUST
refuse a wrong MAC before it looks at anything else, and a number that is not the next one: an old
message that is sent again, a lost one, or two in another order. Each direction of a channel has
another key (`derive`), so that a message cannot be sent back to its sender. Nothing is encrypted.
"""

import hmac

import blake3

from tpdet.errors import IntegrityError

MAC_BYTES = 32
NUMBER_BYTES = 8
OVERHEAD_BYTES = MAC_BYTES + NUMBER_BYTES


def derive(secret: bytes, purpose: str, nonces: bytes = b"") -> bytes:
    """The key (32 bytes) of one purpose, from a secret of 32 bytes and `nonces`."""
    return blake3.blake3(purpose.encode() + b"\0" + nonces, key=secret).digest()


class Sealer:
    """The sending end of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def seal(self, payload: bytes) -> bytes:
        """The sealed bytes of the next message."""
        rest = self._number.to_bytes(NUMBER_BYTES, "little") + payload
        self._number += 1
        return blake3.blake3(rest, key=self._key).digest() + rest


class Opener:
    """The receiving end of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def open(self, data: bytes) -> bytes:
        """The payload. Raises IntegrityError; nothing that comes later is accepted either then."""
        mac, rest = data[:MAC_BYTES], data[MAC_BYTES:]
        found = blake3.blake3(rest, key=self._key).digest()
        if not hmac.compare_digest(mac, found) or len(rest) < NUMBER_BYTES:
            self._number = -1
            raise IntegrityError("its MAC is wrong: it was damaged, or made by somebody else")
        number = int.from_bytes(rest[:NUMBER_BYTES], "little")
        if number != self._number:
            due, self._number = self._number, -1
            raise IntegrityError(f"it is number {number} where {due} was due: sent again, or lost")
        self._number += 1
        return rest[NUMBER_BYTES:]
