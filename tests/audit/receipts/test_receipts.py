import json
import random
import shutil
import sqlite3
import struct
import subprocess
from base64 import b64decode
from hashlib import sha256
from itertools import product

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, Signature, Signer, SSlibKey

from tests.lib.receipts import BEGAN, FACTS, ended_answer, new_audited
from tests.lib.tree import ROOT
from tpdet.audit.log.tiles import decode_entries, encode_entries
from tpdet.audit.receipts.bundle import Bundle, decode_bundle, make_bundle, read_bundle
from tpdet.audit.receipts.content import ContentStore
from tpdet.audit.receipts.directory import AuditDirectory, unverified_statement
from tpdet.audit.receipts.envelope import seal, unseal
from tpdet.audit.receipts.keys import TrustedKeys, generate_key, open_key, public_key
from tpdet.audit.receipts.statement import (
    ServerFacts,
    SignedSpan,
    check_content,
    content_of,
    statement_of,
)
from tpdet.audit.receipts.verify import check_bundle, check_directory, check_leaf
from tpdet.audit.replay import LEFT_OUT
from tpdet.errors import (
    AuditError,
    AuditUnavailableError,
    NotFoundError,
    NotPermittedError,
    UsageError,
)

SERVER = ServerFacts(tokenizer="ab" * 32, template=None, versions={"tpdet": "1"}, node="host")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A directory of five receipts that nobody changes."""
    return new_audited(tmp_path_factory.mktemp("whole"), 5)


@pytest.fixture
def audited(whole, tmp_path):
    """A copy of it, to be damaged."""
    for path in (whole.key, whole.keys):
        shutil.copy2(path, tmp_path)
    shutil.copytree(whole.path, tmp_path / "audit")
    return type(whole)(tmp_path / "audit", tmp_path / whole.key.name, tmp_path / whole.keys.name)


def bundle_of(audited, leaf: int, earlier: int | None = None) -> Bundle:
    with AuditDirectory(audited.path).reading(audited.trusted) as (log, store):
        _, content = AuditDirectory.locate(log, store, f"{leaf:032x}")
        return make_bundle(log, leaf, content, earlier)


def test_a_directory_and_a_bundle_of_each_receipt_hold(whole):
    checked = check_directory(whole.path, whole.trusted)
    assert (checked.checkpoint.size, checked.with_content) == (5, 5)
    assert checked.by_outcome == {"completed": 5}
    for leaf in range(5):
        bundle = decode_bundle(bundle_of(whole, leaf).encode(), "it")
        verified = check_bundle(bundle, whole.trusted)
        assert (verified.leaf, verified.erased) == (leaf, False)
        assert verified.statement.predicate.tokens == (3, 3)


def test_a_call_of_several_prompts_and_weights_holds(tmp_path):
    audited = new_audited(tmp_path)
    spans = (SignedSpan(0, 0, 2, "d1" * 32, "first"), SignedSpan(0, 2, 3, "d2" * 32, "next", True))
    mixed = {"spans": spans, "replay_digest": None}
    audited.write([ended_answer(1, prompts=2), ended_answer(2, **mixed)])
    assert check_directory(audited.path, audited.trusted).with_content == 2
    statement = check_bundle(bundle_of_id(audited, 2), audited.trusted).statement
    assert statement.predicate.spans == spans
    assert statement.digest_of("answer") is None


def bundle_of_id(audited, number: int) -> Bundle:
    with AuditDirectory(audited.path).reading(audited.trusted) as (log, store):
        return make_bundle(log, *AuditDirectory.locate(log, store, f"{number:032x}"))


def test_a_receipt_of_the_most_choices_is_a_leaf(tmp_path):
    many = ended_answer(1, prompts=1024)
    content = content_of(many)
    leaf = seal(statement_of(many, content, SERVER), generate_key(tmp_path / "key"))
    predicate = unverified_statement(leaf, 0).predicate
    assert predicate.tokens == (3 * 2 * 1024,) and predicate.prompt_tokens == (4 * 1024,)


def test_openssl_verifies_a_receipt_without_our_code(whole, tmp_path):
    """By the commands of docs/audit.md."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    page = (ROOT / "docs" / "audit.md").read_text()
    commands = page.split("### With openssl alone")[1].split("```sh\n")[1].split("```")[0]
    public = json.loads(whole.keys.read_text())["keys"][0]["keyval"]["public"]
    bundle = bundle_of(whole, 3)
    envelope = json.loads(bundle.leaf)
    forged = envelope | {"payload": encoded(b64decode(envelope["payload"]).replace(b'3"', b'4"'))}
    for leaf, code in ((bundle.leaf, 0), (json.dumps(forged), 1)):
        (tmp_path / "bundle.json").write_bytes(msgspec.structs.replace(bundle, leaf=leaf).encode())
        command = ["bash", "-ec", commands.replace("PUBLIC", public)]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == code, run
        assert ("Signature Verified Successfully" in run.stdout) == (code == 0)


def test_in_totos_own_library_reads_a_statement(whole):
    form = pytest.importorskip("in_toto_attestation.v1.statement")
    protos = pytest.importorskip("in_toto_attestation.v1.statement_pb2")
    from google.protobuf.json_format import Parse

    payload = b64decode(json.loads(bundle_of(whole, 3).leaf)["payload"])
    form.Statement.copy_from_pb(Parse(payload, protos.Statement())).validate()
    with pytest.raises(ValueError, match="subject"):
        nothing = json.dumps(json.loads(payload) | {"subject": []})
        form.Statement.copy_from_pb(Parse(nothing, protos.Statement())).validate()


def test_a_bundle_changed_anywhere_is_refused_in_words(whole):
    """Any value of it in place of any other: an AuditError, never another one.

    But for what is only shown of an answer, which no digest covers.
    """
    draw, text = random.Random(5), bundle_of(whole, 3, earlier=2).encode()
    free = {*LEFT_OUT, "seed"}
    values = [1 << 70, -1, 1.5, None, True, "", "zz", "00" * 32, [], {}, [[]], {"a": 1}]
    for _ in range(400):
        fields = json.loads(text)
        inside, name = draw.choice([*places_of(fields)])
        same, inside[name] = inside[name], draw.choice(values)
        if inside[name] == same and type(inside[name]) is type(same):
            continue
        try:
            check_bundle(decode_bundle(json.dumps(fields), "it"), whole.trusted)
        except AuditError as error:
            assert str(error)
        else:
            shown = "top_k" in inside and name in free
            unread = inside is fields["consistency"] or name in ("consistency", "consistent_with")
            assert shown or unread or fields["content"] is None, name


def places_of(value):
    """Every place of a JSON value: what it is in, and its name there."""
    names = value if isinstance(value, dict) else range(len(value))
    for name in names:
        yield value, name
        if isinstance(value[name], dict | list):
            yield from places_of(value[name])


def test_each_field_of_a_signed_receipt_is_covered(whole):
    bundle = bundle_of(whole, 2)
    payload = json.loads(b64decode(json.loads(bundle.leaf)["payload"]))
    names = [("predicate", name) for name in payload["predicate"]]
    names += [("predicate", "facts", name) for name in payload["predicate"]["facts"]]
    names += [("subject", 0, "digest", "sha256"), ("subject", 1, "digest", "sha256")]
    assert len(names) > 25
    for path in names:
        changed = json.loads(json.dumps(payload))
        *above, last = path
        inside = changed
        for name in above:
            inside = inside[name]
        inside[last] = flipped(inside[last])
        leaf = json.loads(bundle.leaf) | {"payload": encoded(msgspec.json.encode(changed))}
        forged = msgspec.structs.replace(bundle, leaf=json.dumps(leaf))
        with pytest.raises(AuditError, match="leaf 2: the signature by key"):
            check_bundle(forged, whole.trusted)


def flipped(value):
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case str():
            return ("f" if value[:1] != "f" else "e") + value[1:]
        case int() | float():
            return value + 1
        case list():
            return [*value, *value] or ["more"]
        case dict():
            return {**value, "more": 1}
    return "something"


def encoded(data: bytes) -> str:
    return msgspec.json.decode(msgspec.json.encode(data))


CHANGES = {
    "ids": lambda c: change(c["answers"][0]["outputs"][0]["token_ids"]),
    "bits": lambda c: change(c["answers"][0]["outputs"][1]["logprob_bits"]),
    "request": lambda c: change(c["answers"][0]["prompt_token_ids"]),
    "contract": lambda c: c["answers"][0].update(contract="c1" * 32),
    "weights": lambda c: c["answers"][0].update(weights="d2" * 32),
    "parameters": lambda c: c["answers"][0]["params"].update(top_k=5),
    "salt": lambda c: c.update(salt="00" * 32),
    "seed": lambda c: c["answers"][0].update(seed=42),
    "digest": lambda c: c.update(replay_digest="00" * 32),
    "stop": lambda c: c["answers"][0]["params"].update(stop=[]),
}


def change(values: list) -> None:
    value = values[1]
    values[1] = value + 1 if isinstance(value, int) else f"{int(value, 16) ^ 1:08x}"


@pytest.mark.parametrize("name", CHANGES)
def test_content_that_was_changed_is_named(audited, name):
    """A bundle's content, and the store's."""
    fields = json.loads(bundle_of(audited, 1).encode())
    CHANGES[name](fields["content"])
    with pytest.raises(AuditError, match="is not what was signed: its ") as bundled:
        check_bundle(decode_bundle(json.dumps(fields), "it"), audited.trusted)
    with sqlite3.connect(audited.path / "content.sqlite") as store:
        content = json.dumps(fields["content"]).encode()
        store.execute("UPDATE receipts SET content = ? WHERE leaf = 1", (content,))
    with pytest.raises(AuditError, match="is not what was signed") as stored:
        check_directory(audited.path, audited.trusted)
    word = {"salt": "request", "seed": "request", "stop": "request", "digest": "replay_digest"}
    assert f"its {word.get(name, name)} differs" in str(bundled.value)
    assert f"its {word.get(name, name)} differs" in str(stored.value)


def test_every_bit_of_tokens_and_log_probabilities_is_covered(whole):
    statement = check_bundle(bundle_of(whole, 1), whole.trusted).statement
    content = bundle_of(whole, 1).content
    (answer,) = content.answers
    for place, choice in enumerate(answer.outputs):
        for position, flip in product(range(3), (1 << bit for bit in range(32))):
            ids, bits = [*choice.token_ids], [*choice.logprob_bits]
            ids[position] ^= flip
            bits[position] = f"{int(bits[position], 16) ^ flip:08x}"
            for name, changes in (("ids", {"token_ids": ids}), ("bits", {"logprob_bits": bits})):
                outputs = [*answer.outputs]
                outputs[place] = msgspec.structs.replace(choice, **changes)
                other = msgspec.structs.replace(answer, outputs=tuple(outputs))
                with pytest.raises(AuditError, match=f"receipt 1 .* its {name} differs"):
                    changed = msgspec.structs.replace(content, answers=(other,))
                    check_content(statement, changed, "receipt 1")


def test_erased_content_is_gone_and_the_log_holds(audited):
    """No byte of it is left in any file, and what is left does not confirm a guessed prompt."""
    before = content_of(ended_answer(3))
    store = ContentStore(audited.path / "content.sqlite")
    salt = json.loads(store.read(f"{3:032x}").content)["salt"]
    files = [path for path in audited.path.rglob("*") if path.is_file()]
    assert any(salt.encode() in path.read_bytes() for path in files)
    assert store.erase([f"{3:032x}"]) == 1
    store.close()
    checked = check_directory(audited.path, audited.trusted)
    assert (checked.checkpoint.size, checked.with_content) == (5, 4)
    bundle = bundle_of(audited, 3)
    assert check_bundle(bundle, audited.trusted).erased
    left = b"".join(p.read_bytes() for p in audited.path.rglob("*") if p.is_file())
    payload = b64decode(json.loads(bundle.leaf)["payload"])
    # Whoever guesses the prompt right computes all its digests, and finds none of them.
    guesses = {before.request_digest, before.replay_digest, salt}
    guesses |= {sha256(bytes.fromhex(guess)).hexdigest() for guess in guesses}
    for guess, end in product(guesses, (1, 2)):
        for text in (guess.encode(), bytes.fromhex(guess)):
            assert text[: len(text) // end] not in left + payload
    for word in ("secret", "seed", '"41"', ":41,", "7,8,3"):
        assert word.encode() not in payload
    # The same answer has another receipt: nothing in one follows from the content alone.
    other = statement_of(ended_answer(3), content_of(ended_answer(3)), SERVER)
    mine = json.loads(payload)
    for name in ("ids", "bits"):
        assert json.loads(other)["predicate"][name] != mine["predicate"][name]
    assert not {s["digest"]["sha256"] for s in json.loads(other)["subject"]} & {
        s["digest"]["sha256"] for s in mine["subject"]
    }


def test_a_salt_confirms_what_was_signed(whole):
    """The control: with the salt, the same guess is confirmed."""
    bundle = bundle_of(whole, 3)
    salt, plain = bytes.fromhex(bundle.content.salt), content_of(ended_answer(3))
    payload = json.loads(b64decode(json.loads(bundle.leaf)["payload"]))
    mark = sha256(salt + bytes.fromhex(plain.request_digest)).hexdigest()
    assert payload["subject"][0] == {"name": "request", "digest": {"sha256": mark}}
    ids = b"".join(struct.pack("<4I", 3, 3, 4, 5) for _ in range(2))
    assert payload["predicate"]["ids"] == sha256(salt + sha256(ids).digest()).hexdigest()


def test_retention_erases_what_is_old(audited):
    store = ContentStore(audited.path / "content.sqlite")
    assert store.erase(one.id for one in store.before(BEGAN + 2)) == 2
    assert [one.content for one in store.before(BEGAN + 2)] == [b"", b""]
    store.close()
    assert check_directory(audited.path, audited.trusted).with_content == 3


def test_a_copy_of_the_log_alone_is_checked(audited):
    (audited.path / "content.sqlite").unlink()
    assert check_directory(audited.path, audited.trusted).with_content == 0
    assert check_bundle(bundle_of(audited, 4), audited.trusted).erased


def test_only_keys_that_were_given_count(whole, tmp_path):
    other = TrustedKeys((generate_key(tmp_path / "key").public,))
    with pytest.raises(AuditError, match="none of the"):
        check_directory(whole.path, other)
    with pytest.raises(AuditError, match="none of the keys given"):
        check_bundle(bundle_of(whole, 1), other)
    # A key of another's that bears the right id.
    forged = msgspec.structs.replace(other.keys[0], keyid=whole.entry.keyid)
    with pytest.raises(AuditError, match="signature by key"):
        check_bundle(bundle_of(whole, 1), TrustedKeys((forged,)))


def test_a_rotated_key_counts_up_to_its_end_only(audited, tmp_path):
    old = bundle_of(audited, 1)
    key = generate_key(tmp_path / "next")
    audited.trusted.with_next(key.public, 5).write(audited.keys)
    shutil.copy(audited.keys, audited.path / "keys.json")
    with pytest.raises(UsageError, match="ended or revoked"):
        audited.write([ended_answer(5)])
    audited.write([ended_answer(5), ended_answer(6)], tmp_path / "next")
    assert check_directory(audited.path, audited.trusted).checkpoint.size == 7
    assert check_bundle(old, audited.trusted).leaf == 1
    # What either signs in the place of the other is refused.
    content = content_of(ended_answer(9))
    for name, leaf in (("audit.key", 5), ("next", 4)):
        signed = seal(
            statement_of(ended_answer(9), content, SERVER), open_key(str(tmp_path / name))
        )
        with pytest.raises(AuditError, match=f"leaf {leaf}: key .*: another key has its place"):
            check_leaf(signed, leaf, audited.trusted)


def test_a_revoked_key_counts_nowhere_behind(audited):
    assert check_directory(audited.path, audited.trust(revoked=5)).checkpoint.size == 5
    old = bundle_of(audited, 1)
    with pytest.raises(AuditError, match="rotated or revoked"):
        check_directory(audited.path, audited.trust(revoked=3))
    with pytest.raises(AuditError, match="rotated or revoked"):
        check_bundle(old, audited.trusted)
    with pytest.raises(AuditError, match=r"leaf 1: key .* is revoked from leaf 0 on"):
        check_bundle(old, audited.trust(revoked=0))


def test_a_receipt_of_another_leaf_is_not_included(whole):
    bundle, other = bundle_of(whole, 1), bundle_of(whole, 2)
    for changes in ({"index": 3}, {"leaf": other.leaf}, {"proof": other.proof}, {"index": -1}):
        with pytest.raises(AuditError, match=r"proof does not lead|signs from leaf 0"):
            check_bundle(msgspec.structs.replace(bundle, content=None, **changes), whole.trusted)


def test_a_log_goes_on_from_an_earlier_checkpoint(audited, tmp_path):
    note = (audited.path / "log" / "checkpoint").read_bytes()
    audited.write([ended_answer(5), ended_answer(6)])
    check_directory(audited.path, audited.trusted, note)
    check_bundle(bundle_of(audited, 6, earlier=5), audited.trusted, note)
    with pytest.raises(AuditError, match="no proof that its log goes on from 5"):
        check_bundle(bundle_of(audited, 6), audited.trusted, note)
    # A fork: the same key, the same origin, other leaves.
    forked = type(audited)(tmp_path / "forked", audited.key, audited.keys)
    forked.write([ended_answer(number) for number in (0, 1, 2, 4, 3, 5, 6)])
    with pytest.raises(AuditError, match="forked"):
        check_directory(forked.path, forked.trusted, note)
    with pytest.raises(AuditError, match="forked"):
        check_bundle(bundle_of(forked, 6, earlier=5), forked.trusted, note)
    # One that was cut off.
    short = type(audited)(tmp_path / "short", audited.key, audited.keys)
    short.write([ended_answer(number) for number in range(4)])
    with pytest.raises(AuditError, match="had 5"):
        check_directory(short.path, short.trusted, note)


def test_a_log_that_was_cut_off_is_noticed_by_its_content(audited, tmp_path):
    short = type(audited)(tmp_path / "short", audited.key, audited.keys)
    short.write([ended_answer(number) for number in range(4)])
    shutil.rmtree(audited.path / "log")
    shutil.copytree(short.path / "log", audited.path / "log")
    with pytest.raises(AuditError, match="its end was cut off"):
        check_directory(audited.path, audited.trusted)
    with pytest.raises(AuditError, match="its end was cut off"):
        audited.write([])


def test_reordered_and_duplicated_receipts_are_noticed(audited, tmp_path):
    bundle = audited.path / "log" / "tile" / "entries" / "000.p" / "5"
    leaves = decode_entries(bundle.read_bytes(), "bundle")
    bundle.write_bytes(encode_entries([leaves[1], leaves[0], *leaves[2:]]))
    with pytest.raises(AuditError, match="leaf 0 was changed"):
        check_directory(audited.path, audited.trusted)
    # By whoever holds the key: one receipt twice.
    log = AuditDirectory(tmp_path / "twice").open_log(open_key(str(audited.key)))
    for _ in range(2):
        log.append(leaves[0]).result()
    log.close()
    with pytest.raises(AuditError, match="leaf 0 and leaf 1 are both receipt"):
        check_directory(tmp_path / "twice", audited.trusted)


def test_a_receipt_of_the_future_is_refused(tmp_path):
    audited = new_audited(tmp_path)
    audited.write([ended_answer(0, ended=4e9)])
    with pytest.raises(AuditError, match="leaf 0 ended at 2096-"):
        check_directory(audited.path, audited.trusted)


def test_a_clock_that_jumps_back_changes_nothing(tmp_path):
    audited = new_audited(tmp_path)
    audited.write([ended_answer(0), ended_answer(1, ended=BEGAN - 1e8)])
    assert check_directory(audited.path, audited.trusted).checkpoint.size == 2


BAD_BUNDLES = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "deep": b"[" * 100000,
    "another type": b'{"bundle": "urn:x"}',
    "a path": b'{"bundle": "urn:tpdet:receipt-bundle:v1", "path": "../../etc/passwd"}',
    "not UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("name", BAD_BUNDLES)
def test_a_bad_bundle_is_refused(tmp_path, name):
    path = tmp_path / "bundle.json"
    path.write_bytes(BAD_BUNDLES[name])
    with pytest.raises(AuditError, match=r"is no bundle|not UTF-8"):
        read_bundle(path)


def test_a_bundle_of_100_megabytes_is_refused_unread(tmp_path):
    path = tmp_path / "bundle.json"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(AuditError, match="over the limit of"):
        read_bundle(path)


def test_an_endless_proof_and_broken_hex_are_refused(whole):
    fields = json.loads(bundle_of(whole, 1).encode())
    for changes in (
        {"proof": ["00" * 32] * 1000},
        {"proof": ["zz"]},
        {"proof": ["00"]},
        {"index": 1 << 80},
        {"checkpoint": "x"},
        {"leaf": "{}"},
        {"leaf": '{"payload": 1, "payloadType": 2, "signatures": {}}'},
        {"content": fields["content"] | {"salt": "xy"}},
        {"content": fields["content"] | {"answers": []}},
    ):
        with pytest.raises(AuditError):
            check_bundle(decode_bundle(json.dumps(fields | changes), "it"), whole.trusted)


def test_a_leaf_is_one_signature_over_a_statement_of_ours(tmp_path):
    key = generate_key(tmp_path / "key")
    keys = TrustedKeys((key.public,))
    for payload, words in (
        (b"{}", "no statement"),
        (b'{"_type": "x"}', "no statement"),
        (statement(_type="https://in-toto.io/Statement/v0.1"), "not urn:tpdet:answer:v1"),
        (statement(predicateType="urn:other"), "'urn:other', not"),
    ):
        with pytest.raises(AuditError, match=words):
            check_leaf(seal(payload, key), 0, keys)
    fields = json.loads(seal(statement(), key))
    for changes in (
        {"signatures": []},
        {"signatures": fields["signatures"] * 2},
        {"payloadType": "text/plain"},
    ):
        with pytest.raises(AuditError):
            unseal(json.dumps(fields | changes).encode(), 0, keys)


def statement(**changes) -> bytes:
    fields = json.loads(statement_of(ended_answer(), content_of(ended_answer()), SERVER))
    return json.dumps(fields | changes).encode()


def test_keys_are_private_new_and_found(tmp_path):
    path = tmp_path / "key"
    key = generate_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert open_key(str(path)).public == key.public
    with pytest.raises(NotPermittedError, match="never replaced"):
        generate_key(path)
    with pytest.raises(NotFoundError):
        open_key(str(tmp_path / "absent"))
    path.chmod(0o640)
    with pytest.raises(NotPermittedError, match="chmod 600"):
        open_key(str(path))
    (tmp_path / "other").write_text("no key")
    (tmp_path / "other").chmod(0o600)
    with pytest.raises(UsageError, match="holds no private key"):
        open_key(str(tmp_path / "other"))
    with pytest.raises(UsageError, match="no key with this uri"):
        open_key("awskms:1234")
    unknown = msgspec.structs.replace(key.public, uri="nosuch:1234")
    with pytest.raises(UsageError, match="cannot be used"):
        open_key("nosuch:1234", TrustedKeys((unknown,)))


class TokenSigner(Signer):
    """A key in hardware, as a signer of securesystemslib's: it never leaves its place."""

    SECRET = ec.generate_private_key(ec.SECP256R1())
    works = True

    @classmethod
    def from_priv_key_uri(cls, uri, public_key, secrets_handler=None):
        return cls()

    @property
    def public_key(self):
        return SSlibKey.from_crypto(self.SECRET.public_key())

    def sign(self, payload):
        if not self.works:
            raise OSError("the token was pulled out")
        return Signature(self.public_key.keyid, self.SECRET.sign(payload, ec.ECDSA(SHA256())).hex())


def test_a_key_in_hardware_signs_receipts_and_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setitem(SIGNER_FOR_URI_SCHEME, "token", TokenSigner)
    audited = new_audited(tmp_path)
    shutil.rmtree(audited.path)
    audited.path.mkdir()
    entry = public_key(TokenSigner().public_key, "token:1")
    for path in (audited.keys, audited.path / "keys.json"):
        TrustedKeys((entry,)).write(path)
    audited.write([ended_answer(0)], "token:1")
    assert check_directory(audited.path, audited.trusted).checkpoint.size == 1
    monkeypatch.setattr(TokenSigner, "works", False)
    with pytest.raises(UsageError, match="pulled out"):
        audited.write([], "token:1")


def test_a_directory_is_one_servers(audited):
    directory = AuditDirectory(audited.path)
    key = directory.open_key(str(audited.key))
    log = directory.open_log(key)
    with pytest.raises(AuditUnavailableError, match="in use"):
        directory.open_log(key)
    log.close()


def test_a_crash_between_content_and_log_leaves_no_orphan(audited):
    """Content whose receipt never came to be logged is dropped; leaves unknown here are learned."""
    with sqlite3.connect(audited.path / "content.sqlite") as store:
        store.execute("INSERT INTO receipts VALUES ('orphan', NULL, 1.0, x'00')")
        store.execute("UPDATE receipts SET leaf = NULL WHERE leaf IN (2, 4)")
        assert store.execute("SELECT count(*) FROM receipts").fetchone() == (6,)
    audited.write([ended_answer(5)])
    checked = check_directory(audited.path, audited.trusted)
    assert (checked.checkpoint.size, checked.with_content) == (6, 6)
    store = ContentStore(audited.path / "content.sqlite")
    assert store.read("orphan") is None and store.read(f"{4:032x}").leaf == 4
    store.close()


STRANGE = {
    "another receipt's leaf": (
        "UPDATE receipts SET leaf = 9 WHERE leaf = 1; UPDATE receipts SET leaf = 1 WHERE leaf = 2; "
        "UPDATE receipts SET leaf = 2 WHERE leaf = 9",
        "as leaf 2, which is another one",
    ),
    "a leaf that is a text": ("UPDATE receipts SET leaf = 'x' WHERE leaf = 2", "has b'x' where"),
    "content that is a number": ("UPDATE receipts SET content = 7 WHERE leaf = 2", "has 7 where"),
    "content that is not UTF-8": (
        "UPDATE receipts SET content = x'7b2273616c74223a22e422' WHERE leaf = 2",
        "leaf 2.* has another form",
    ),
    "a view without an end": (
        "ALTER TABLE receipts RENAME TO other; CREATE VIEW receipts AS WITH RECURSIVE n(i) AS "
        "(SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, i AS leaf, i AS ended, "
        "NULL AS content FROM n",
        "is no content store: it has, or lacks, 'CREATE",
    ),
    "a trigger": (
        "CREATE TRIGGER t AFTER UPDATE ON receipts BEGIN DELETE FROM receipts; END",
        "is no content store: it has, or lacks, 'CREATE TRIGGER",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strangers_content_store_is_checked_and_none_hangs(audited, name):
    """A receipt's place, the types of values, and the schema."""
    statements, words = STRANGE[name]
    with sqlite3.connect(audited.path / "content.sqlite") as store:
        store.executescript(statements)
    with pytest.raises(AuditError, match=words):
        check_directory(audited.path, audited.trusted)
    with pytest.raises(AuditError, match=words):
        for leaf in (1, 2):
            bundle_of(audited, leaf)


def test_a_damaged_content_store_is_refused_in_words(audited):
    file, draw = audited.path / "content.sqlite", random.Random(7)
    true, refused = file.read_bytes(), 0
    for _ in range(60):
        data, place = bytearray(true), draw.randrange(len(true))
        data[place : place + 100] = draw.randbytes(100)
        file.write_bytes(data)
        try:
            check_directory(audited.path, audited.trusted)
        except (AuditError, AuditUnavailableError) as error:
            refused += bool(str(error))
    assert refused > 12


def test_facts_are_in_the_statement_and_in_no_digest():
    one, other = ended_answer(), ended_answer(facts=msgspec.structs.replace(FACTS, tp=8))
    assert content_of(one).request_digest == content_of(other).request_digest
    content = content_of(one)
    shown = [json.loads(statement_of(a, content, SERVER))["predicate"] for a in (one, other)]
    assert [s.pop("facts")["tp"] for s in shown] == [2, 8]
    assert shown[0] == shown[1]
