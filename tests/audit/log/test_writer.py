"""The durable writer: group commit, one writer a directory, refusals, readers meanwhile."""

import errno
import os
import subprocess
import sys
import threading
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.audit.log.audit_logs import KEY, ORIGIN, SECRET, leaves_of, open_log, read_log
from tests.audit.log.simulated_disk import SimulatedDisk
from tests.lib.tree import ROOT
from tpdet.audit.log.checkpoint import NoteKey
from tpdet.audit.log.disk import Disk
from tpdet.audit.log.reader import LogReader
from tpdet.audit.log.writer import AuditLog
from tpdet.errors import AuditError, AuditUnavailableError, NotFoundError, UsageError


def test_a_log_gives_indexes_and_can_be_read_while_it_is_written(tmp_path):
    log = open_log(tmp_path / "a" / "log", publish_seconds=0.001)
    for begin in range(0, 600, 60):
        leaves = leaves_of(begin, begin + 60)
        futures = [log.append(leaf) for leaf in leaves]
        assert [future.result() for future in futures] == [*range(begin, begin + 60)]
        reader = read_log(tmp_path / "a" / "log")
        assert [*reader.leaves()][begin:] == leaves
        reader.verify()
    log.close()
    reader = read_log(tmp_path / "a" / "log")
    assert reader.published == reader.checkpoint
    assert [*reader.leaves()] == leaves_of(0, 600)
    assert sorted(os.listdir(tmp_path / "a" / "log")) == ["checkpoint", "journal", "lock", "tile"]
    assert not os.listdir(tmp_path / "a" / "log" / "journal")
    assert sorted(os.listdir(tmp_path / "a" / "log" / "tile" / "0")) == ["000", "001", "002.p"]


def test_appends_of_many_threads_share_commits(tmp_path):
    class Gate(Disk):
        """Holds the first sync of a record back until all have appended."""

        opened, syncs = threading.Event(), 0

        def sync(self, descriptor):
            if self.counting:
                self.syncs += 1
                self.opened.wait()
            super().sync(descriptor)

        counting = False

    disk = Gate()
    log = open_log(tmp_path, disk)
    disk.counting = True
    futures = [log.append(leaf) for leaf in leaves_of(0, 200)]
    assert not any(future.done() for future in futures)
    disk.opened.set()
    assert [future.result() for future in futures] == [*range(200)]
    assert disk.syncs <= 2, "one commit took the first leaf or more, one the rest"
    disk.counting = False
    log.close()


def test_a_future_cannot_be_cancelled(tmp_path):
    log = open_log(tmp_path)
    future = log.append(b"leaf")
    assert not future.cancel()
    log.close()
    assert future.result() == 0


def test_a_closed_log_takes_nothing(tmp_path):
    log = open_log(tmp_path)
    log.close()
    log.close()
    with pytest.raises(AuditUnavailableError, match="is closed"):
        log.append(b"leaf").result()


def test_a_leaf_of_64_kib_is_refused(tmp_path):
    log = open_log(tmp_path)
    with pytest.raises(UsageError, match="65536 bytes"):
        log.append(bytes(1 << 16))
    assert log.append(bytes((1 << 16) - 1)).result() == 0
    log.close()
    read_log(tmp_path).verify()


def test_two_logs_in_one_directory_are_refused(tmp_path):
    log = open_log(tmp_path)
    with pytest.raises(AuditUnavailableError, match=f"in use by process {os.getpid()}") as caught:
        open_log(tmp_path)
    assert caught.value.exit_code == 74
    assert log.append(b"leaf").result() == 0
    log.close()
    open_log(tmp_path).close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", ["make_folder", "create", "write", "sync"])
def test_a_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path, number, name):
    disk = SimulatedDisk()
    disk.failing[name] = number
    with pytest.raises(AuditUnavailableError, match="cannot be written") as caught:
        open_log(tmp_path, disk)
    assert caught.value.exit_code == 74 and caught.value.code == "audit_unavailable"
    assert "receipt" in caught.value.public and str(tmp_path) not in caught.value.public
    disk.failing.clear()
    log = open_log(tmp_path, disk)
    assert log.append(b"leaf").result() == 0
    log.close()


@pytest.mark.slow
def test_a_file_system_that_fills_up_and_is_then_read_only(tmp_path):
    """The kernel's own errors; needs the right to mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        log, durable = open_log(tmp_path / "log", publish_seconds=0.01), 0
        with pytest.raises(AuditUnavailableError, match="No space left"):
            while True:
                durable = log.append(bytes(2000)).result() + 1
        reader = read_log(tmp_path / "log")
        reader.verify()
        assert 100 < durable <= reader.checkpoint.size
        subprocess.run(["mount", "-o", "remount,size=8m", tmp_path], check=True)
        assert log.append(b"again").result() >= durable
        log.close()
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        assert read_log(tmp_path / "log").leaf(durable - 1) == bytes(2000)
        with pytest.raises(AuditUnavailableError, match="Read-only file system"):
            open_log(tmp_path / "log")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "log").write_text("")
    with pytest.raises(AuditUnavailableError, match="cannot be written"):
        open_log(tmp_path / "log")
    with pytest.raises(NotFoundError, match="holds no audit log"):
        read_log(tmp_path / "log")


def test_a_key_store_that_fails_refuses_appends_until_it_works(tmp_path):
    working = threading.Event()
    working.set()

    def sign(text):
        if not working.is_set():
            raise ConnectionError("no key store")
        return SECRET.sign(text)

    log = AuditLog(tmp_path, sign, ORIGIN, KEY.name, KEY.public)
    assert log.append(b"first").result() == 0
    working.clear()
    with pytest.raises(AuditUnavailableError, match="does not sign: no key store"):
        log.append(b"second").result()
    working.set()
    assert log.append(b"third").result() == 1
    log.close()
    assert [*read_log(tmp_path).leaves()] == [b"first", b"third"]


def test_another_origin_or_key_is_refused_and_a_trusted_key_is_gone_on_from(tmp_path):
    log = open_log(tmp_path)
    log.append(b"leaf").result()
    log.close()
    with pytest.raises(AuditError, match=r"is the log of example.com/log, not of other.example"):
        AuditLog(tmp_path, SECRET.sign, "other.example", KEY.name, KEY.public)
    secret = Ed25519PrivateKey.generate()
    key = NoteKey("example.com/new", secret.public_key().public_bytes_raw())
    with pytest.raises(AuditError, match="none of the trusted keys"):
        AuditLog(tmp_path, secret.sign, ORIGIN, key.name, key.public)
    log = AuditLog(tmp_path, secret.sign, ORIGIN, key.name, key.public, [KEY])
    with pytest.raises(AuditError, match="none of the trusted keys"):
        read_log(tmp_path)  # signed anew at the start
    assert log.append(b"more").result() == 1
    log.close()
    assert [*LogReader(tmp_path, [key]).leaves()] == [b"leaf", b"more"]


def test_a_key_that_is_not_the_signer_s_is_refused(tmp_path):
    with pytest.raises(AuditError, match=r"signature of example.com/log"):
        AuditLog(tmp_path, SECRET.sign, ORIGIN, KEY.name, bytes(32))


def test_a_clock_that_jumps_back_changes_nothing(tmp_path, monkeypatch):
    log = open_log(tmp_path, publish_seconds=0.001)
    log.append(b"before").result()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert log.append(b"after").result() == 1
    log.close()
    read_log(tmp_path).verify()


def test_the_log_imports_no_torch():
    code = "import tpdet.audit.log.writer, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
