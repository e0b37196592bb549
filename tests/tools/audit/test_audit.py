import errno
import json
import shutil
import subprocess
import sys

import pytest

from tests.lib.receipts import Audited, ended_answer, new_audited
from tests.lib.tree import ROOT
from tpdet.audit.receipts.directory import AuditDirectory
from tpdet.audit.receipts.keys import generate_key, open_key
from tpdet.cli import main
from tpdet.server.answers.files import AnswerFiles, AnswerName
from tpdet.server.batches.record import Batch, BatchFile
from tpdet.server.batches.store import AnswerRow, BatchStore
from tpdet.server.front.tally import SharedTally

ID = f"{1:032x}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A directory of three receipts that nobody changes."""
    return new_audited(tmp_path_factory.mktemp("whole"), 3)


@pytest.fixture
def audited(whole, tmp_path):
    """A copy of it, to be changed."""
    shutil.copytree(whole.path, tmp_path / "audit")
    for path in (whole.key, whole.keys):
        shutil.copy2(path, tmp_path)
    return Audited(tmp_path / "audit", tmp_path / whole.key.name, tmp_path / whole.keys.name)


def audit(name: str, *arguments: object) -> int:
    """The exit code of `tpdet audit`, here in this process."""
    return main(["audit", name, *map(str, arguments)])


def test_no_command_imports_torch(whole):
    """In a process of its own, to its end: verification runs where no torch is installed."""
    names = [str(whole.path), "--keys", str(whole.keys)]
    page = [*names, "--html", str(whole.path.parent / "page.html")]
    code = (
        "import sys; sys.modules['torch'] = None; from tpdet.cli import main; "
        f"sys.exit(main(['audit', 'verify', *{names}]) or main(['audit', 'report', *{page}]))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("3 receipts hold (3 completed); 3 have their content\n")


def test_keygen_makes_a_key_and_its_entry_once(tmp_path, capsys):
    key, keys = tmp_path / "audit.key", tmp_path / "keys.json"
    assert audit("keygen", key) == 0
    assert key.stat().st_mode & 0o777 == 0o600
    (entry,) = json.loads(keys.read_text())["keys"]
    assert entry["keyid"] in capsys.readouterr().out
    assert b"PRIVATE" in key.read_bytes() and b"PRIVATE" not in keys.read_bytes()
    assert audit("keygen", key) == 77
    assert "never replaced" in capsys.readouterr().err
    assert audit("keygen", tmp_path / "second") == 0
    assert len(json.loads(keys.read_text())["keys"]) == 2


def test_keygen_leaves_no_key_that_it_cannot_finish(tmp_path, monkeypatch, capsys):
    """Else the next try would be refused, as a key is never replaced."""
    key = tmp_path / "audit.key"
    assert audit("keygen", key, "--keys", tmp_path / "absent" / "keys.json") == 77
    assert "absent/keys.json cannot be written" in capsys.readouterr().err
    assert not key.exists()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            generate_key(key)
    assert not any(tmp_path.iterdir())
    assert audit("keygen", key) == 0


def test_a_key_takes_over_where_the_log_is(audited, capsys):
    other = audited.path.parent / "other.key"
    log = AuditDirectory(audited.path).open_log(open_key(str(audited.key)))
    assert audit("keygen", other, "--replace", audited.path) == 74
    assert "stop it first" in capsys.readouterr().err and not other.exists()
    log.close()
    assert audit("keygen", other, "--replace", audited.path) == 0
    old, new = json.loads(audited.keys.read_text())["keys"]
    assert (old["end"], new["first"]) == (3, 3)
    shutil.copy(audited.keys, audited.path)
    audited.write([ended_answer(3)], other)
    assert audit("verify", audited.path, "--keys", audited.keys) == 0
    assert "4 receipts hold" in capsys.readouterr().out


def test_keygen_takes_the_public_key_of_a_uri(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = Ed25519PrivateKey.generate().public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(pem)
    flags = ("--keys", tmp_path / "keys.json", "--uri", "hv:receipts/1")
    assert audit("keygen", *flags) == 2
    assert audit("keygen", *flags, "--public", tmp_path / "public.pem") == 0
    (entry,) = json.loads((tmp_path / "keys.json").read_text())["keys"]
    assert (entry["uri"], entry["keytype"]) == ("hv:receipts/1", "ed25519")


def test_a_bundle_is_all_that_a_stranger_needs(audited, tmp_path, capsys):
    note = tmp_path / "note"
    shutil.copy(audited.path / "log" / "checkpoint", note)
    audited.write([ended_answer(3)])
    bundle, keys = tmp_path / "bundle.json", ("--keys", audited.keys)
    flags = (*keys, "--checkpoint", note)
    assert audit("export", audited.path, ID, "--out", bundle, *flags) == 0
    shutil.rmtree(audited.path)
    assert audit("verify", bundle, *flags) == 0
    assert f"receipt {ID} holds: leaf 1, completed, 6 tokens" in capsys.readouterr().out
    assert audit("verify", bundle, *keys, "--json") == 0
    assert json.loads(capsys.readouterr().out)["leaf"] == 1
    fields = json.loads(bundle.read_text())
    fields["content"]["answers"][0]["seed"] = 7
    bundle.write_text(json.dumps(fields))
    assert audit("verify", bundle, *keys) == 65
    assert "its request differs" in capsys.readouterr().err


def test_erased_content_is_66_and_the_rest_holds(audited, tmp_path, capsys):
    keys, bundle = ("--keys", audited.keys), tmp_path / "bundle.json"
    assert audit("show", audited.path, ID, *keys) == 0
    assert json.loads(capsys.readouterr().out)["content"]["answers"]
    assert audit("erase", audited.path, ID, "f" * 32) == 66  # none of them
    assert audit("show", audited.path, ID, *keys) == 0
    assert audit("erase", audited.path, ID) == 0
    assert capsys.readouterr().out.endswith("the content of 1 receipt was erased\n")
    assert audit("show", audited.path, ID, *keys) == 66
    shown = json.loads(capsys.readouterr().out)
    assert shown["content"] is None and shown["statement"]["predicate"]["id"] == ID
    assert audit("export", audited.path, ID, "--out", bundle, *keys) == 66
    assert audit("verify", bundle, *keys) == 66
    assert "its content was erased" in capsys.readouterr().out
    assert audit("verify", audited.path, *keys) == 0
    assert audit("erase", audited.path, "--before", "2030-01-01") == 0
    assert audit("verify", audited.path, *keys, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["with_content"] == 0


def test_erasure_reaches_cached_answers(audited, tmp_path, capsys):
    assert audit("show", audited.path, ID, "--keys", audited.keys) == 0
    digest = json.loads(capsys.readouterr().out)["content"]["request_digest"]
    kept = [AnswerName(digest, salt, "") for salt in ("", "s")] + [AnswerName("ab" * 32, "", "")]
    files = AnswerFiles(tmp_path / "answers", 1 << 20, SharedTally.alone())

    def erase(*what):
        for one in kept:
            files.write(one, b"{}")
        code = audit("erase", audited.path, *what)
        return code, [files.read(one) for one in kept]

    cache = ("--answer-cache", tmp_path / "answers")
    assert erase("--before", "2030-01-01", *cache) == (0, [None, None, b"{}"])
    assert "2 cached answers to the same requests were removed" in capsys.readouterr().out
    assert erase(ID, *cache) == (0, [b"{}"] * 3)  # nothing says any more what it was
    assert erase(ID, "--answer-cache", tmp_path / "absent")[0] == 66


def test_erasure_reaches_the_lines_of_batches(audited, tmp_path, capsys):
    store = BatchStore(tmp_path / "batches")  # of a server that runs
    batch = Batch(
        id="batch_1",
        owner="",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_at=1,
        digest="d" * 64,
    )
    with store.new_content("file-1") as file:
        file.write(b'{"custom_id": "a", "body": {"prompt": "asked"}}\n')
    store.put(BatchFile(id="file-1", owner="", created=1, filename="in", bytes=48))
    store.save(batch)
    line = b'{"id": "i", "custom_id": "a", "response": {"body": "told"}, "error": null}'
    flags = ("--batch-dir", tmp_path / "batches")
    for what in (ID,), ("--before", "2030-01-01"):
        store.remove(BatchFile(id="-", owner="", created=1, filename="", bytes=0, batch="batch_1"))
        store.add_answers("batch_1", [AnswerRow(1, ID, False, line)])
        assert audit("erase", audited.path, *what, *flags) == 0
        assert "lines of batches that were erased: 1" in capsys.readouterr().out
        (row,) = store.rendered("batch_1", False, 0)
        assert b"told" not in row.output and b'"custom_id":"a"' in row.output
        with store.open_content("file-1") as file:
            assert file.read() == b'{"custom_id":"a","body":{}}\n'
        assert store.batch("batch_1", "").digest == ""
    store.close()
    assert audit("erase", audited.path, ID, "--batch-dir", tmp_path / "absent") == 66


WRONG = {
    "no keys": (("verify", "DIR", "--keys", "absent"), 66, "not exist: give the keys file of who"),
    "no directory": (
        ("verify", "absent", "--keys", "KEYS"),
        66,
        "absent does not exist: give the d",
    ),
    "no log": (("verify", ".", "--keys", "KEYS"), 66, "no audit log"),
    "no receipt": (("show", "DIR", "../../x", "--keys", "KEYS"), 66, "has no receipt"),
    "no note": (("verify", "DIR", "--keys", "KEYS", "--checkpoint", "absent"), 66, "not exist"),
    "another file": (("verify", "DIR", "--keys", "DIR/log/checkpoint"), 2, "no file of keys"),
    "nothing to erase": (("erase", "DIR"), 2, "name the receipts"),
    "no day": (("erase", "DIR", "--before", "tomorrow"), 2, "is no day"),
    "no key": (("keygen",), 2, "name a new file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(audited, monkeypatch, capsys, name):
    arguments, code, words = WRONG[name]
    monkeypatch.chdir(audited.path.parent)
    names = {"DIR": str(audited.path), "KEYS": str(audited.keys)}
    first = (argument.partition("/") for argument in arguments)
    assert audit(*(names.get(head, head) + slash + rest for head, slash, rest in first)) == code
    assert words in capsys.readouterr().err


def test_a_log_of_other_keys_is_65(audited, tmp_path, capsys):
    (tmp_path / "others").mkdir()
    others = new_audited(tmp_path / "others")
    assert audit("verify", audited.path, "--keys", others.keys) == 65
    assert "none of the trusted keys" in capsys.readouterr().err
