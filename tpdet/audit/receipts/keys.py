"""Signing keys, and the keys file: whose signatures a verifier trusts, over which leaves of a log.

A private key is a PEM file of mode 0600, or lies where a URI of securesystemslib says (KMS,
PKCS#11). Importing this module needs none of the `audit` extra's packages; using it does.
"""

import json
import os
from base64 import b64decode
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tpdet.audit.log.checkpoint import NoteKey
from tpdet.checkpoint.model_config.json_file import read_text_file
from tpdet.errors import AuditError, NotPermittedError, UsageError
from tpdet.launch.host.private_file import read_private_file
from tpdet.launch.host.whole_file import write_text

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

ED25519, P256 = "ed25519", "ecdsa-sha2-nistp256"
MOST_KEYS_BYTES = 1 << 20
_PIN = "PYKCS11PIN"
_PROBE = b"tpdet"  # is signed before a server starts


class TrustedKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A public key, as securesystemslib writes it, and the leaves that it may sign.

    first, end: it signs leaves [first, end) of the log; an `end` is set when another key takes
    over. revoked: the leaf from which on its signatures are worthless, 0 for all of them. uri: of
    its private key, where that is no file.
    """

    keyid: str
    keytype: str
    scheme: str
    keyval: dict[str, str]
    first: int = 0
    end: int | None = None
    revoked: int | None = None
    uri: str | None = None

    @property
    def name(self) -> str:
        """What checkpoints call the key."""
        return f"tpdet-audit-{self.keyid[:12]}"

    @property
    def note_key(self) -> NoteKey | None:
        """The key as checkpoints want it; None for a kind that they do not know."""
        public = self.keyval["public"]
        if self.keytype == ED25519:
            return NoteKey(self.name, bytes.fromhex(public))
        if self.scheme != P256:
            return None
        return NoteKey(self.name, b64decode("".join(public.split("-----")[2].split())))

    def check(self, leaf: int) -> None:
        """Refuse (AuditError) a leaf that this key may not sign."""
        if self.revoked is not None and leaf >= self.revoked:
            raise AuditError(
                f"key {self.keyid[:16]} is revoked from leaf {self.revoked} on: nothing it signed "
                "there counts"
            )
        if leaf < self.first or (self.end is not None and leaf >= self.end):
            until = "on" if self.end is None else f"to leaf {self.end - 1}"
            raise AuditError(
                f"key {self.keyid[:16]} signs from leaf {self.first} {until}: another key has its "
                "place here"
            )

    def may_sign_checkpoint(self, size: int) -> bool:
        """Whether it may sign a checkpoint over so many leaves; both keys may where one ends."""
        last = min(size if end is None else end for end in (self.end, self.revoked))
        return self.first <= size <= last

    def verify(self, signature: str, data: bytes) -> None:
        """Refuse (AuditError) a signature (hex) that is not this key's over the data."""
        from securesystemslib.exceptions import UnverifiedSignatureError
        from securesystemslib.signer import Key, Signature

        fields = {"keytype": self.keytype, "scheme": self.scheme, "keyval": {**self.keyval}}
        try:
            key = Key.from_dict(self.keyid, fields)
            key.verify_signature(Signature(self.keyid, signature), data)
        except (UnverifiedSignatureError, ValueError) as error:
            raise AuditError(
                f"the signature by key {self.keyid[:16]} is wrong: what it signed was changed"
            ) from error


class TrustedKeys(msgspec.Struct, frozen=True):
    """The keys file: the keys that a verifier was given, and no other."""

    keys: tuple[TrustedKey, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "TrustedKeys":
        """The keys of a file. Raises NotFoundError without one, UsageError for another form."""
        text = read_text_file(path, MOST_KEYS_BYTES, "give the keys file of who runs the server")
        try:
            keys = msgspec.json.decode(text, type=cls)
            for key in keys.keys:
                bytes.fromhex(key.keyid)
                _ = key.note_key
        except (msgspec.DecodeError, ValueError, LookupError, RecursionError) as error:
            raise UsageError(
                f"{path} is no file of keys ({error}): take the one that tpdet audit keygen wrote"
            ) from None
        return cls.of(keys.keys)

    @classmethod
    def of(cls, keys: Iterable[TrustedKey]) -> "TrustedKeys":
        """These keys. Raises UsageError where two have one id."""
        listed = (*keys,)
        if len({key.keyid for key in listed}) != len(listed):
            raise UsageError("the keys file names one key twice: keep one of the two")
        return cls(listed)

    def write(self, path: Path) -> None:
        """Write the file, whole."""
        write_text(path, json.dumps(msgspec.to_builtins(self), indent=1) + "\n")

    def named(self, keyid: str) -> TrustedKey:
        """The key of an id. Raises AuditError for one that was not given."""
        for key in self.keys:
            if key.keyid == keyid:
                return key
        raise AuditError(
            f"signed by key {keyid[:16]!r}, which is none of the keys given: get it from whoever "
            "runs the server, by a way that you trust"
        )

    def note_keys(self, size: int | None = None) -> list[NoteKey]:
        """The keys that may sign a checkpoint; size: over so many leaves."""
        return [
            key.note_key
            for key in self.keys
            if key.note_key is not None and (size is None or key.may_sign_checkpoint(size))
        ]

    def with_next(self, key: TrustedKey, size: int) -> "TrustedKeys":
        """These keys, and one that signs from leaf `size` on, in place of those that signed."""
        ended = (
            msgspec.structs.replace(old, end=size) if old.end is None else old for old in self.keys
        )
        return TrustedKeys.of((*ended, msgspec.structs.replace(key, first=size)))


class SigningKey:
    """A private key, ready to sign; `public` is its entry in a keys file."""

    def __init__(self, signer: "Signer", public: TrustedKey) -> None:
        self._signer, self.public = signer, public

    def sign(self, data: bytes) -> bytes:
        """The signature over the data."""
        return bytes.fromhex(self._signer.sign(data).signature)

    def __repr__(self) -> str:
        return f"SigningKey({self.public.keyid[:16]})"


def check_installed() -> None:
    """Refuse (UsageError) to sign or verify without the packages for it."""
    if not (find_spec("securesystemslib") and find_spec("cryptography")):
        raise UsageError("receipts need more packages: pip install 'tpdet[audit]'")


def generate_key(path: Path) -> SigningKey:
    """Make an Ed25519 key in a new file of mode 0600. Raises NotPermittedError if it exists."""
    check_installed()
    from securesystemslib.signer import CryptoSigner

    signer = CryptoSigner.generate_ed25519()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise NotPermittedError(
            f"{path} is there already, and a key is never replaced: name a new file"
        ) from None
    except OSError as error:
        raise NotPermittedError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(signer.private_bytes)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk: a part of a key is none
        path.unlink()
        raise
    return SigningKey(signer, public_key(signer.public_key))


def public_key(key: "Key", uri: str | None = None) -> TrustedKey:
    """The entry of a key in a keys file."""
    return TrustedKey(
        keyid=key.keyid, keytype=key.keytype, scheme=key.scheme, keyval=key.keyval, uri=uri
    )


def is_uri(name: str) -> bool:
    """Whether a key is named by a URI of securesystemslib, and not by its file."""
    scheme, colon, _ = name.partition(":")
    return bool(colon) and scheme.isalnum() and scheme != "file2" and not Path(name).exists()


def open_key(name: str, keys: TrustedKeys | None = None) -> SigningKey:
    """The signing key in a file, or of a URI whose public key is among `keys`.

    Raises NotFoundError, NotPermittedError for a file that others may read, and UsageError for one
    that holds no key, and a URI that nobody knows or that does not answer.
    """
    check_installed()
    if is_uri(name):
        return _open_uri(name, keys or TrustedKeys())
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    data = read_private_file(name, "--audit-key", "a private key of tpdet audit keygen", 1 << 16)
    try:
        private: Any = load_pem_private_key(data, None)
        signer = CryptoSigner(private)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(
            f"--audit-key {name} holds no private key without a password: make one with tpdet "
            "audit keygen"
        ) from None
    return SigningKey(signer, public_key(signer.public_key))


def _secret(name: str) -> str:
    """What a token asks for, which is its PIN; the variable that names its module has a brother."""
    found = os.environ.get(_PIN)
    if found is None:
        raise ValueError(f"it asks for a {name}: set {_PIN} to the token's PIN")
    return found


def _open_uri(uri: str, keys: TrustedKeys) -> SigningKey:
    from securesystemslib.signer import Key, Signer

    named = [key for key in keys.keys if key.uri == uri]
    if not named:
        raise UsageError(
            f"--audit-key {uri}: no key with this uri is in the directory's keys.json: add its "
            "public key with tpdet audit keygen --uri"
        )
    public = named[-1]
    fields = {"keytype": public.keytype, "scheme": public.scheme, "keyval": {**public.keyval}}
    try:
        key = Key.from_dict(public.keyid, fields)
        signing = SigningKey(Signer.from_priv_key_uri(uri, key, _secret), public)
        signature = signing.sign(_PROBE)
    except Exception as error:  # of a library, a module of PKCS#11, or the network
        raise UsageError(f"--audit-key {uri} cannot be used: {error}") from error
    try:
        public.verify(signature.hex(), _PROBE)
    except AuditError:
        raise UsageError(
            f"--audit-key {uri} signs by another key than the one with this uri in the directory's "
            "keys.json: give tpdet audit keygen --uri the public key that belongs to it"
        ) from None
    return signing
