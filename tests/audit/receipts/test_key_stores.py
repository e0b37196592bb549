"""Receipts signed by keys that never leave their store: a PKCS#11 token's and a cloud's KMS's.

The token is SoftHSM's (Debian's package softhsm2) and wants python-pkcs11. The KMS is moto's, which
speaks AWS's protocol, and wants moto[kms,server] and boto3. Those of other clouds are not tried.
"""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib.receipts import Audited, ended_answer
from tpdet.audit.receipts.keys import open_key
from tpdet.audit.receipts.verify import check_directory
from tpdet.cli import main
from tpdet.errors import UsageError
from tpdet.requests.body.problems import ApiError
from tpdet.server.front.receipts import Receipts
from tpdet.server.front.tally import SharedTally
from tpdet.server.wire.process_config import AuditConfig

pytestmark = pytest.mark.slow

MODULES = ("/usr/lib/softhsm/libsofthsm2.so", "/usr/lib/x86_64-linux-gnu/softhsm/libsofthsm2.so")
PIN, TOKEN = "31415926", "hsm:2?label=tpdet"


def pem_of(der: bytes) -> bytes:
    """A public key in the form in which operators have it."""
    from cryptography.hazmat.primitives import serialization

    info = serialization.PublicFormat.SubjectPublicKeyInfo
    return serialization.load_der_public_key(der).public_bytes(serialization.Encoding.PEM, info)


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
    path = tmp_path / "public.pem"
    path.write_bytes(pem_of(der))
    return path


class Kms:
    """A KMS of AWS's protocol, which listens on this machine: its server, and a client of it."""

    def __init__(self, server: Any, client: Any) -> None:
        self.server, self.client = server, client

    def new_key(self, folder: Path) -> tuple[str, Path]:
        """The ARN of a new key on P-256, and its public key's file."""
        made = self.client.create_key(KeySpec="ECC_NIST_P256", KeyUsage="SIGN_VERIFY")
        name = made["KeyMetadata"]["Arn"]
        path = folder / f"{name[-36:]}.pem"
        path.write_bytes(pem_of(self.client.get_public_key(KeyId=name)["PublicKey"]))
        return name, path


def sign_digest(key: Any, digest: bytes, _: str) -> bytes:
    """As AWS signs what is a digest already, which moto hashes once more."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, utils

    return key.private_key.sign(digest, ec.ECDSA(utils.Prehashed(hashes.SHA256())))


@pytest.fixture
def kms(monkeypatch) -> Iterator[Kms]:
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    moto = pytest.importorskip("moto.server", reason="moto[kms,server] is not installed")
    from moto.kms.utils import ECDSAPrivateKey

    monkeypatch.setattr(ECDSAPrivateKey, "sign", sign_digest)
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        address, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{address}:{port}",
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "eu-central-1",
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            monkeypatch.setenv(name, value)
        yield Kms(server, boto3.client("kms"))
    finally:
        server.stop()


def check_store(uri: str, public: Path, folder: Path) -> Audited:
    """Have a key's store sign three receipts, hold them to the key, and the directory too."""
    audited = Audited(folder / "audit", Path(uri), folder / "audit" / "keys.json")
    audited.path.mkdir()
    keys = str(audited.keys)
    assert main(["audit", "keygen", "--uri", uri, "--public", str(public), "--keys", keys]) == 0
    audited.write([ended_answer(number) for number in range(3)], uri)
    assert check_directory(audited.path, audited.trusted).checkpoint.size == 3
    assert main(["audit", "verify", str(audited.path), "--keys", keys]) == 0
    audited.entry.verify(open_key(uri, audited.trusted).sign(b"said").hex(), b"said")
    return audited


def test_a_token_signs_receipts_and_checkpoints(token, tmp_path, monkeypatch):
    audited = check_store(TOKEN, token, tmp_path)
    assert PIN.encode() not in b"".join(
        path.read_bytes() for path in audited.path.rglob("*") if path.is_file()
    )
    # The controls: a wrong PIN, and none.
    monkeypatch.setenv("PYKCS11PIN", "0000")
    with pytest.raises(UsageError, match="cannot be used"):
        open_key(TOKEN, audited.trusted)
    monkeypatch.delenv("PYKCS11PIN")
    with pytest.raises(UsageError, match="set PYKCS11PIN to the token's PIN"):
        open_key(TOKEN, audited.trusted)


@pytest.mark.parametrize("named", ["arn", "alias"])
def test_a_clouds_kms_signs_receipts_and_checkpoints(kms, tmp_path, named):
    name, public = kms.new_key(tmp_path)
    if named == "alias":
        kms.client.create_alias(AliasName="alias/audit", TargetKeyId=name)
        name = "alias/audit"
    audited = check_store(f"awskms:{name}", public, tmp_path)
    unknown = f"awskms:{'0' * 36}"
    with pytest.raises(UsageError, match=r"cannot be used: .*NotFoundException"):
        open_key(unknown, audited.trust(uri=unknown))


def test_a_kms_that_is_gone_makes_no_receipt_and_harms_none(kms, tmp_path):
    name, public = kms.new_key(tmp_path)
    uri = f"awskms:{name}"
    audited = check_store(uri, public, tmp_path)
    receipts = Receipts(AuditConfig(str(audited.path), uri, True), None, SharedTally.alone())
    try:
        asyncio.run(receipts.write(ended_answer(3)))
        kms.server.stop()
        with pytest.raises(ApiError) as refused:
            asyncio.run(receipts.write(ended_answer(4)))
        assert (refused.value.status, refused.value.code) == (503, "audit_unavailable")
    finally:
        receipts.close()
    assert check_directory(audited.path, audited.trusted).checkpoint.size == 4
    with pytest.raises(UsageError, match=r"cannot be used: .*connect"):
        open_key(uri, audited.trusted)


def test_a_uri_whose_key_is_another_is_refused(kms, tmp_path, monkeypatch):
    name, public = kms.new_key(tmp_path)
    other, _ = kms.new_key(tmp_path)
    audited = check_store(f"awskms:{name}", public, tmp_path)
    wrong = f"awskms:{other}"
    trusted = audited.trust(uri=wrong)
    with pytest.raises(UsageError, match="signs by another key"):
        open_key(wrong, trusted)
    # And a KMS that signs what nobody asked for.
    trusted = audited.trust(uri=f"awskms:{name}")
    other_digest = lambda key, digest, kind: sign_digest(key, digest[::-1], kind)
    monkeypatch.setattr("moto.kms.utils.ECDSAPrivateKey.sign", other_digest)
    with pytest.raises(UsageError, match="signs by another key"):
        open_key(f"awskms:{name}", trusted)
