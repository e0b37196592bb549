"""C2SP checkpoints: the signed head of a tree, as a C2SP signed note (Ed25519 or ECDSA).

A checkpoint's text is three lines: the log's origin, its size, its root in base64. A note is the
text, an empty line, and signature lines: an em dash, the key's name, base64 of the key's id and the
signature over the text.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256

from tpdet.audit.log.merkle import HASH_BYTES
from tpdet.errors import AuditError, UsageError

ED25519, ECDSA = b"\x01", b"\x02"
"""Types of signatures. ECDSA is for keys in hardware: few of them know the other."""
KEY_BYTES, SIGNATURE_BYTES = 32, 64
P256_HEAD = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")
"""What a public key of P-256 begins with as DER; its two coordinates, 32 bytes each, follow."""
MOST_NOTE_BYTES = 1 << 20

Sign = Callable[[bytes], bytes]
"""Gives the signature over a text: of Ed25519 64 bytes, of ECDSA (SHA-256) as DER."""

_NAME = re.compile(r"[^\s+\x00-\x1f]+")
_SIGNATURE = re.compile(r"— (\S+) (\S+)")


@dataclass(frozen=True)
class NoteKey:
    """A verifier's key: the name that signature lines bear, and the public key.

    public: 32 bytes of Ed25519, or of ECDSA on P-256 the SubjectPublicKeyInfo as DER.
    """

    name: str
    public: bytes

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"key name {self.name!r} is empty or has a space or a plus: rename it")
        is_p256 = len(self.public) == len(P256_HEAD) + 64 and self.public.startswith(P256_HEAD)
        if len(self.public) != KEY_BYTES and not is_p256:
            raise UsageError(
                f"the key of {self.name} has {len(self.public)} bytes: Ed25519 has 32, and no "
                "other kind is known but ECDSA on P-256"
            )

    @property
    def kind(self) -> bytes:
        """The type of its signatures."""
        return ED25519 if len(self.public) == KEY_BYTES else ECDSA

    @property
    def id(self) -> bytes:
        """Four bytes that signature lines name the key by."""
        named = self.name.encode() + b"\n" + ED25519 if self.kind == ED25519 else b""
        return sha256(named + self.public).digest()[:4]

    def __str__(self) -> str:
        encoded = base64.b64encode(self.kind + self.public).decode()
        return f"{self.name}+{self.id.hex()}+{encoded}"

    @classmethod
    def parse(cls, text: str) -> "NoteKey":
        """The key that `str` wrote, as other tools write it. Raises UsageError for any other."""
        name, _, rest = text.strip().partition("+")
        digits, _, encoded = rest.partition("+")
        public = _decoded(encoded)
        if public is None or public[:1] not in (ED25519, ECDSA):
            raise UsageError(f"{text[:80]!r} is no key of a note that is known: NAME+ID+BASE64")
        key = cls(name, public[1:])
        if key.kind != public[:1]:
            raise UsageError(f"key {name} is not of the type that it says: copy it again")
        if key.id.hex() != digits:
            raise UsageError(f"the id of key {name} is {key.id.hex()}, not {digits}: copy it again")
        return key

    def verifies(self, text: bytes, signature: bytes) -> bool:
        """Whether the signature over the text is this key's."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
        from cryptography.hazmat.primitives.hashes import SHA256

        try:
            if self.kind == ED25519:
                ed25519.Ed25519PublicKey.from_public_bytes(self.public).verify(signature, text)
            else:
                point = self.public[len(P256_HEAD) - 1 :]
                key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
                key.verify(signature, text, ec.ECDSA(SHA256()))
        except (InvalidSignature, ValueError):  # or no point of the curve
            return False
        return True


@dataclass(frozen=True)
class LogCheckpoint:
    """The head of a tree: the log's origin, its number of leaves, its root (32 bytes)."""

    origin: str
    size: int
    root: bytes

    def text(self) -> bytes:
        """What is signed."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n".encode()

    def signed(self, key: NoteKey, sign: Sign) -> bytes:
        """The signed note. Raises ValueError where `sign` gives no signature."""
        return signed_note(self.text(), key, sign)


def signed_note(text: bytes, key: NoteKey, sign: Sign) -> bytes:
    """A note of the text, signed by one key. Raises ValueError where `sign` gives no signature."""
    signature = sign(text)
    if key.kind == ED25519 and len(signature) != SIGNATURE_BYTES:
        raise ValueError(f"a signature of {len(signature)} bytes is none of Ed25519, which has 64")
    encoded = base64.b64encode(key.id + signature).decode()
    return text + f"\n— {key.name} {encoded}\n".encode()


def verified_text(note: bytes, keys: Iterable[NoteKey]) -> bytes:
    """The text of a note, once one of the keys has signed it and none of them signed it wrongly.

    Raises AuditError for a note that is malformed, forged, or signed by other keys alone.
    """
    if len(note) > MOST_NOTE_BYTES:
        raise AuditError(f"a note of {len(note)} bytes is above {MOST_NOTE_BYTES}: it is none")
    body, empty, lines = note.rpartition(b"\n\n")
    try:
        text, signatures = (body + b"\n").decode(), lines.decode()
    except UnicodeDecodeError:
        raise AuditError("a note is not UTF-8: it was changed, or is no note") from None
    whole = text + "\n" + signatures
    if not empty or not signatures.endswith("\n") or re.search(r"[\x00-\x09\x0b-\x1f]", whole):
        raise AuditError("a note lacks its empty line, its last newline, or has control characters")
    known = {(key.name, key.id): key for key in keys}
    verified, names = False, []
    for line in signatures[:-1].split("\n"):
        match = _SIGNATURE.fullmatch(line)
        encoded = _decoded(match[2]) if match else None
        if match is None or encoded is None or len(encoded) < 5:
            raise AuditError(f"a note has the signature line {line[:80]!r}: it was changed")
        names.append(f"{match[1]}+{encoded[:4].hex()}")
        key = known.get((match[1], encoded[:4]))
        if key is not None:
            if not key.verifies(text.encode(), encoded[4:]):
                raise AuditError(f"the signature of {names[-1]} is wrong: the note was changed")
            verified = True
    if not verified:
        raise AuditError(f"a note is signed by {', '.join(names[:4])}, none of the trusted keys")
    return text.encode()


def verified_checkpoint(note: bytes, keys: Iterable[NoteKey]) -> LogCheckpoint:
    """The checkpoint in a note. Raises AuditError as `verified_text`, and for any other text."""
    lines = verified_text(note, keys).decode().split("\n")
    root = _decoded(lines[2]) if len(lines) > 3 else None
    if root is None or len(root) != HASH_BYTES or not lines[0] or "" in lines[3:-1]:
        raise AuditError(f"a note that begins with {lines[0][:80]!r} is no checkpoint")
    if not re.fullmatch(r"0|[1-9][0-9]{0,18}", lines[1]):
        raise AuditError(f"a checkpoint has the size {lines[1][:40]!r}: it is no number of leaves")
    return LogCheckpoint(lines[0], int(lines[1]), root)


def _decoded(text: str) -> bytes | None:
    """Canonical base64, or None."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if base64.b64encode(data).decode() == text else None
