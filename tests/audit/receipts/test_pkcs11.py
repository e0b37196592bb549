"""Receipts signed by a real PKCS#11 token, SoftHSM's: the key never leaves it.

It wants SoftHSM (Debian's package softhsm2) and python-pkcs11. The signers of clouds' KMS are not
tried: nothing of them runs here, and a fake of one would prove nothing.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lib.receipts import Audited, ended_answer
from tpdet.audit.receipts.keys import open_key
from tpdet.audit.receipts.verify import check_directory
from tpdet.cli import main
from tpdet.errors import UsageError

pytestmark = pytest.mark.slow

MODULES = ("/usr/lib/softhsm/libsofthsm2.so", "/usr/lib/x86_64-linux-gnu/softhsm/libsofthsm2.so")
PIN, URI = "31415926", "hsm:2?label=tpdet"


@pytest.fixture
def token(tmp_path, monkeypatch):
    """A new token with a key on P-256; the public key's file."""
    module = next((path for path in MODULES if Path(path).exists()), None)
    if module is None or shutil.which("softhsm2-util") is None:
        pytest.skip("SoftHSM is not installed (softhsm2)")
    pkcs11 = pytest.importorskip("pkcs11", reason="python-pkcs11 is not installed")
    from pkcs11.util.ec import encode_ec_public_key, encode_named_curve_parameters

    folder = tmp_path / "tokens"
    folder.mkdir()
    config = tmp_path / "softhsm2.conf"
    config.write_text(f"directories.tokendir = {folder}\nobjectstore.backend = file\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(config))
    monkeypatch.setenv("PYKCS11LIB", module)
    monkeypatch.setenv("PYKCS11PIN", PIN)
    command = ["softhsm2-util", "--init-token", "--free", "--label", "tpdet"]
    subprocess.run([*command, "--pin", PIN, "--so-pin", PIN], check=True, capture_output=True)
    with pkcs11.lib(module).get_token(token_label="tpdet").open(user_pin=PIN, rw=True) as session:
        curve = session.create_domain_parameters(
            pkcs11.KeyType.EC,
            {pkcs11.Attribute.EC_PARAMS: encode_named_curve_parameters("secp256r1")},
            local=True,
        )
        public, private = curve.generate_keypair(store=True, id=b"\x02", label="audit")
        assert not private[pkcs11.Attribute.EXTRACTABLE]
        der = encode_ec_public_key(public)
    from cryptography.hazmat.primitives import serialization

    pem = serialization.load_der_public_key(der).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    path = tmp_path / "public.pem"
    path.write_bytes(pem)
    return path


def test_a_token_signs_receipts_and_checkpoints(token, tmp_path, monkeypatch, capsys):
    audited = Audited(tmp_path / "audit", Path(URI), tmp_path / "audit" / "keys.json")
    audited.path.mkdir()
    keys = str(audited.keys)
    assert main(["audit", "keygen", "--uri", URI, "--public", str(token), "--keys", keys]) == 0
    capsys.readouterr()
    audited.write([ended_answer(number) for number in range(3)], URI)
    assert check_directory(audited.path, audited.trusted).checkpoint.size == 3
    assert main(["audit", "verify", str(audited.path), "--keys", keys]) == 0
    assert PIN.encode() not in b"".join(
        path.read_bytes() for path in audited.path.rglob("*") if path.is_file()
    )
    signed = open_key(URI, audited.trusted).sign(b"said")
    audited.entry.verify(signed.hex(), b"said")
    # The controls: a wrong PIN, and none.
    monkeypatch.setenv("PYKCS11PIN", "0000")
    with pytest.raises(UsageError, match="cannot be used"):
        open_key(URI, audited.trusted)
    monkeypatch.delenv("PYKCS11PIN")
    with pytest.raises(UsageError, match="set PYKCS11PIN to the token's PIN"):
        open_key(URI, audited.trusted)
