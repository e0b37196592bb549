"""DSSE envelopes: a statement, signed, as the bytes of a leaf of the log.

A leaf is compact JSON `{"payload", "payloadType", "signatures": [{"keyid", "sig"}]}`; `payload` and
`sig` are base64. What is signed is the pre-authentication encoding of type and payload, so any tool
that knows DSSE verifies it.
"""

from typing import NamedTuple

import msgspec

from tpdet.audit.log.tiles import MOST_LEAF_BYTES
from tpdet.audit.receipts.keys import SigningKey, TrustedKeys
from tpdet.errors import AuditError

PAYLOAD_TYPE = "application/vnd.in-toto+json"


class Opened(NamedTuple):
    """What an envelope holds once its signature is verified, and the id of the key."""

    payload: bytes
    keyid: str


def seal(payload: bytes, key: SigningKey) -> bytes:
    """The envelope of a payload, signed. Raises AuditError for one that no leaf holds."""
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import Signature

    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    keyid = key.public.keyid
    envelope.signatures[keyid] = Signature(keyid, key.sign(envelope.pae()).hex())
    leaf = msgspec.json.encode(envelope.to_dict())
    if len(leaf) > MOST_LEAF_BYTES:
        raise AuditError(f"a receipt of {len(leaf)} bytes is over {MOST_LEAF_BYTES}")
    return leaf


def unseal(leaf: bytes, index: int, keys: TrustedKeys) -> Opened:
    """The payload of an envelope that stands as leaf `index`, signed by a key that may.

    Raises AuditError for another form, an unknown, rotated or revoked key, a wrong signature.
    """
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import FormatError

    try:
        fields = msgspec.json.decode(leaf, type=dict)
        envelope = Envelope.from_dict(fields)
    except (KeyError, ValueError, TypeError, AttributeError, FormatError, RecursionError) as error:
        raise AuditError(f"leaf {index} is no DSSE envelope ({error}): it was changed") from None
    if envelope.payload_type != PAYLOAD_TYPE:
        raise AuditError(f"leaf {index} holds {envelope.payload_type!r}, not {PAYLOAD_TYPE}")
    if len(envelope.signatures) != 1:
        raise AuditError(f"leaf {index} has {len(envelope.signatures)} signatures, not one")
    ((keyid, signature),) = envelope.signatures.items()
    try:
        key = keys.named(keyid)
        key.check(index)
        key.verify(signature.signature, envelope.pae())
    except AuditError as error:
        raise AuditError(f"leaf {index}: {error}") from error
    return Opened(envelope.payload, keyid)
