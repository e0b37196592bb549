"""Flags, TOML, keys: what a server is started with, and what is refused."""

import hashlib
import json
import os

import pytest

from tpdet.errors import NotFoundError, NotPermittedError, UsageError
from tpdet.server.keys import KeyRing, read_key_file
from tpdet.server.protocol import socket_address
from tpdet.server.settings import load_settings, make_parser
from tpdet.server.supervised import split_ranks

# Frozen: operators' scripts and unit files hold these names.
FLAGS = """
    --allow-faults --api-key-file --approximate --audit-dir --batch-swing-alarm
    --canary-interval --chat-template --compile-ahead --config --device --disable-log-stats
    --disable-uvicorn-access-log --drain-timeout --dtype --enable-prefix-caching
    --enforce-eager --fixed-batch --fold-order --gpu-memory-utilization --help --host
    --kv-pages --leaves --load-format --max-model-len --max-num-batched-tokens --max-num-seqs
    --max-queue --max-slowdown --model --no-allow-faults --no-approximate --no-compile-ahead
    --no-disable-log-stats --no-disable-uvicorn-access-log --no-enable-prefix-caching
    --no-enforce-eager --no-skip-tokenizer-init --on-slowdown --port
    --print-limits --revision --row-layers --run-dir --run-secret-file --seed
    --served-model-name --share-draws --skip-tokenizer-init --start-timeout --step-timeout
    --tokenizer --transport
"""


def load(*arguments: str):
    return load_settings(arguments, "test")


def test_the_flags_are_the_ones_operators_know():
    parser = make_parser("test")
    found = [o for a in parser._actions for o in a.option_strings if o.startswith("--")]
    assert sorted(found) == FLAGS.split()


def test_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('model = "a"\nmax-num-seqs = 4\nport = 1234\ndrain_timeout = 3\n')
    found = load("--config", str(file), "--max-num-seqs", "8")
    assert found.engine.model == "a" and found.engine.max_num_seqs == 8
    assert found.server.port == 1234 and found.server.drain_timeout == 3.0
    assert found.served_name == "a"
    assert load("b", "--config", str(file)).engine.model == "b"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--model"),
        (("a", "--model", "b"), "two models"),
        (("a", "--nope"), "--nope"),
        (("a", "--max-queu", "3"), "--max-queu"),
        (("a", "b"), "b"),
        (("a", "--max-queue", "0"), "max_queue"),
        (("a", "--max-queue", "many"), "max_queue"),
        (("a", "--fold-order", "random"), "random"),
        (("a", "--drain-timeout", "-1"), "drain_timeout"),
        (("a", "--host", "0.0.0.0"), "api_key_file"),
        (("a", "--audit-dir", "x"), "audit_dir"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(arguments, word):
    with pytest.raises(UsageError, match=word):
        load(*arguments)


@pytest.mark.parametrize("text", ["nope = 1", "port = 1\nmodel = ", "max-queue=1\nmax_queue=2"])
def test_a_wrong_file_is_refused(tmp_path, text):
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(UsageError):
        load("a", "--config", str(file))
    with pytest.raises(NotFoundError):
        load("a", "--config", str(tmp_path / "other"))


def test_print_limits_prints_json_and_ends(capsys):
    with pytest.raises(SystemExit) as ended:
        load("--print-limits")
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["body_bytes"] == 10 << 20


def test_the_ranks_get_every_flag_but_the_number_of_ranks():
    for flag in ("--tp", "-tp", "--tensor-parallel-size"):
        assert split_ranks(["DIR", flag, "4", "--port", "0"]) == (4, ["DIR", "--port", "0"])
    assert split_ranks(["--tp=2", "--model", "x"]) == (2, ["--model", "x"])
    assert split_ranks(["DIR"]) == (None, ["DIR"])
    with pytest.raises(UsageError):
        split_ranks(["--tp", "0"])


def test_keys_are_read_from_a_private_file_only(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# comment\n\nsk-1\n  sk-2  \n")
    file.chmod(0o640)
    with pytest.raises(NotPermittedError, match="0640"):
        read_key_file(str(file))
    file.chmod(0o600)
    digests = read_key_file(str(file))
    assert digests == tuple(hashlib.sha256(key).hexdigest() for key in (b"sk-1", b"sk-2"))
    for text in ("", "# none\n", "two words\n"):
        file.write_text(text)
        with pytest.raises(UsageError):
            read_key_file(str(file))


def test_what_cannot_be_a_key_file_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    large = tmp_path / "large"
    large.write_bytes(b"sk-1\n" + b"#" * (1 << 20))
    large.chmod(0o600)
    for path, kind, word in (
        (pipe, UsageError, "not a file"),
        (tmp_path, (UsageError, NotPermittedError), "not a file|cannot be read"),
        (large, UsageError, "1048576"),
        (tmp_path / "none", NotFoundError, "does not exist"),
    ):
        with pytest.raises(kind, match=word):
            read_key_file(str(path))


def test_a_tenants_salt_is_its_keys_and_the_runs():
    digests = tuple(hashlib.sha256(key).hexdigest() for key in (b"sk-1", b"sk-2"))
    ring, other = KeyRing(digests, b"s" * 32), KeyRing(digests[::-1], b"s" * 32)
    one, two = ring.tenant_salt(b"Bearer sk-1"), ring.tenant_salt(b"Bearer sk-2")
    assert one and two and one != two and one not in digests
    assert other.tenant_salt(b"bearer sk-1") == one
    assert ring.tenant_salt(b"Bearer sk-3") is None and ring.tenant_salt(b"Basic sk-1") is None
    assert KeyRing(digests).tenant_salt(b"Bearer sk-1") != one
    assert KeyRing(()).tenant_salt(None) == ""


def test_a_key_ring_accepts_its_keys_and_nothing_near_them():
    ring = KeyRing((hashlib.sha256(b"sk-1").hexdigest(),))
    assert ring.accepts(b"Bearer sk-1") and ring.accepts(b"bearer  sk-1")
    for wrong in (None, b"", b"sk-1", b"Bearer", b"Bearer sk-", b"Bearer sk-11", b"Basic sk-1"):
        assert not ring.accepts(wrong)
    assert KeyRing(()).accepts(None)


def test_a_run_directory_too_long_for_a_socket_is_refused():
    assert socket_address("/run/x") == "ipc:///run/x/engine.sock"
    with pytest.raises(UsageError, match="shorter"):
        socket_address("/" + "x" * 100)
