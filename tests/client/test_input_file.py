"""Files that commands are given: none makes a command wait for ever, read without end, or crash."""

import io
import os
import sys
import time

import pytest

from tpdet.cli import main
from tpdet.client.input_file import numbered_lines, read_input
from tpdet.errors import CheckpointError

COMMANDS = (
    ("check", "M", "FILE"),
    ("score", "M", "FILE"),
    ("score", "M", "--tokens", "FILE"),
    ("run-batch", "FILE", os.devnull, "--url", "http://127.0.0.1:9", "--model", "m"),
)


@pytest.fixture
def files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 3 << 30)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:3]))
@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("pipe", 65, "it is a named pipe, not a file: "),
        ("/dev/zero", 65, "it is a device, not a file: "),
        ("folder", 65, "it is a directory, not a file: "),
        ("huge", 65, "is over the limit of "),
        ("none", 66, "does not exist: "),
        ("a/b\0", 65, "cannot be read ("),
    ],
)
def test_what_is_no_file_is_refused_at_once(files, capsys, command, name, code, why):
    begin = time.monotonic()
    path = str(files / name)
    assert main([path if word == "FILE" else word for word in command]) == code
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1 and said.startswith("tpdet: ")
    assert ("- < " in said) == (name == "pipe")
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[2], COMMANDS[3]], ids=lambda c: c[0])
@pytest.mark.parametrize("data", [b"[" * 100_000, b"\x00\xff\xfe\n{", b'{"a": ' + b"9" * 10_000])
def test_what_is_no_json_is_one_line(tmp_path, capsys, command, data):
    (tmp_path / "file").write_bytes(data)
    path = str(tmp_path / "file")
    assert main([path if word == "FILE" else word for word in command]) in (2, 65)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("tpdet: ") and len(said) < 1000
    assert "line 1" in said or command[0] == "score"


def test_standard_input_has_a_limit(monkeypatch):
    class Endless(io.RawIOBase):
        def fileno(self):
            return os.open(os.devnull, os.O_RDONLY)

        def read(self, size=-1):
            return b"0" * size

    monkeypatch.setattr(sys, "stdin", type("Input", (), {"buffer": Endless()}))
    with pytest.raises(CheckpointError, match="standard input is over the limit of 100 bytes"):
        read_input("-", "give less", 100)


def test_a_mark_before_the_text_and_the_ends_of_windows_are_no_text():
    data = b"\xef\xbb\xbfa\r\n\r\n b\n"
    assert [(n, line.strip()) for n, line in numbered_lines(data)] == [(1, b"a"), (3, b"b")]
