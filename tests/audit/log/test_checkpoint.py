"""Signed notes and checkpoints: C2SP's and Go's examples, and what is not one."""

import base64
from hashlib import sha256

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tpdet.audit.log.checkpoint import (
    LogCheckpoint,
    NoteKey,
    signed_note,
    verified_checkpoint,
    verified_text,
)
from tpdet.errors import AuditError, UsageError

GO_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_SECRET = "AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz"
GO_TEXT = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
)
GO_LINE = (
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngot"
    "pRZb6KE6RyyBwJnAM=\n"
)
C2SP_KEY = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
C2SP_NOTE = (
    "This is an example message.\n\n— example.com/foo Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2O"
    "NncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=\n"
)
SECRET = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEY = NoteKey("example.com/log", SECRET.public_key().public_bytes_raw())
CHECKPOINT = LogCheckpoint("example.com/log", 300, bytes(32))
NOTE = CHECKPOINT.signed(KEY, SECRET.sign)


def test_the_published_notes_verify():
    assert verified_text((GO_TEXT + "\n" + GO_LINE).encode(), [NoteKey.parse(GO_KEY)])
    assert verified_text(C2SP_NOTE.encode(), [NoteKey.parse(C2SP_KEY)])
    assert str(NoteKey.parse(GO_KEY)) == GO_KEY


def test_a_note_is_signed_as_go_signs_it():
    secret = Ed25519PrivateKey.from_private_bytes(base64.b64decode(GO_SECRET)[1:])
    found = signed_note(GO_TEXT.encode(), NoteKey.parse(GO_KEY), secret.sign)
    assert found.decode() == GO_TEXT + "\n" + GO_LINE


def test_a_key_in_hardware_signs_by_ecdsa():
    """Its id is that of its DER alone, as the specification of signed notes says."""
    secret = ec.generate_private_key(ec.SECP256R1())
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    key = NoteKey("example.com/log", secret.public_key().public_bytes(*form))
    sign = lambda text: secret.sign(text, ec.ECDSA(SHA256()))
    note = CHECKPOINT.signed(key, sign)
    assert key.id == sha256(key.public).digest()[:4]
    assert verified_checkpoint(note, [NoteKey.parse(str(key)), KEY]) == CHECKPOINT
    with pytest.raises(AuditError, match="is wrong"):
        verified_checkpoint(note.replace(b"\n300\n", b"\n301\n"), [key])
    for public in (bytes(31), key.public[:-1], bytes(91)):
        with pytest.raises(UsageError, match="Ed25519 has 32"):
            NoteKey("example.com/log", public)
    with pytest.raises(UsageError, match="not of the type"):
        NoteKey.parse("a+00000000+" + base64.b64encode(b"\x02" + bytes(32)).decode())


def test_a_checkpoint_is_three_lines_and_comes_back():
    root = base64.b64encode(bytes(32)).decode()
    assert CHECKPOINT.text().decode() == f"example.com/log\n300\n{root}\n"
    assert verified_checkpoint(NOTE, [KEY]) == CHECKPOINT


def test_signatures_of_unknown_keys_are_passed_over():
    more = NOTE + "".join(f"— witness{i}.example AAAAAAAA\n" for i in range(16)).encode()
    assert verified_checkpoint(more, [KEY]) == CHECKPOINT
    other = NoteKey("example.com/log", bytes(32))
    with pytest.raises(AuditError, match="none of the trusted keys"):
        verified_checkpoint(NOTE, [other])
    with pytest.raises(AuditError, match="none of the trusted keys"):
        verified_checkpoint(NOTE, [])


def test_every_changed_byte_of_a_checkpoint_is_refused():
    for place in range(len(NOTE)):
        changed = NOTE[:place] + bytes([NOTE[place] ^ 1]) + NOTE[place + 1 :]
        with pytest.raises(AuditError):
            verified_checkpoint(changed, [KEY])
    for end in range(len(NOTE)):
        with pytest.raises(AuditError):
            verified_checkpoint(NOTE[:end], [KEY])


@pytest.mark.parametrize(
    "text",
    ["example.com/log\n", "a\n01\nAAAA\n", "a\n1\nAAAA\n", "\n1\n" + "A" * 43 + "=\n",
     "a\n-1\n" + "A" * 43 + "=\n", "a\n1\n" + "A" * 43 + "=\n\nmore\n",
     "a\n" + "9" * 30 + "\n" + "A" * 43 + "=\n"],
)  # fmt: skip
def test_a_signed_note_that_is_no_checkpoint_is_refused(text):
    note = signed_note(text.encode(), KEY, SECRET.sign)
    with pytest.raises(AuditError, match=r"no checkpoint|no number of leaves"):
        verified_checkpoint(note, [KEY])


def test_a_note_of_any_size_and_bytes_is_refused_quickly():
    for note in b"", b"\xff\n\n\n", b"\n\n", b"a" * (2 << 20), NOTE.replace(b"300", b"3\r0"):
        with pytest.raises(AuditError):
            verified_checkpoint(note, [KEY])


@pytest.mark.parametrize(
    "text", ["", "a+b", "a b+00000000+AAAA", GO_KEY[:-4] + "AAAA", GO_KEY.replace("c74f", "c74e")]
)
def test_a_key_that_is_none_is_refused(text):
    with pytest.raises(UsageError):
        NoteKey.parse(text)


def test_a_key_store_that_signs_nothing_is_refused():
    with pytest.raises(ValueError, match="64"):
        CHECKPOINT.signed(KEY, lambda text: b"")
