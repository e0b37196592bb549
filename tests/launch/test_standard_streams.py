"""Standard streams that are closed, full, or without a reader or letters end no command badly."""

import os
import subprocess
import sys

import pytest

from tests.lib.tree import ROOT
from tpdet.errors import UsageError
from tpdet.launch.host.standard_streams import READER_LEFT, argument_text

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(code, *arguments, redirect="", **options):
    """The finished process of `run_command` over a function `command`, by a shell's redirection."""
    program = (
        "import sys\n"
        "from tpdet.errors import NotFoundError\n"
        "from tpdet.launch.host.standard_streams import argument_text, print_utf8, run_command\n"
        f"def command():\n    {code}\n    return 0\n"
        "sys.exit(run_command(command))"
    )
    shell = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", program, *arguments]
    environment = os.environ | options.pop("env", {})
    return subprocess.run(shell, capture_output=True, cwd=ROOT, env=environment, **options)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_leaves_early_ends_a_command_with_141(stream):
    code = f"print('x' * 200_000, file=sys.{stream})"
    done = run(code, redirect=f"{'2>&1' if stream == 'stderr' else ''} | head -c 1; true")
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr
    program = (
        "import sys\nfrom tpdet.launch.host.standard_streams import run_command\n"
        f"sys.exit(run_command(lambda: print('x' * 200_000, file=sys.{stream}) or 0))"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    getattr(running, stream).close()
    other = running.stderr if stream == "stdout" else running.stdout
    assert other.read() == b""
    assert running.wait() == READER_LEFT == 141


def test_a_broken_pipe_that_is_no_standard_stream_is_an_error_of_its_own():
    done = run("raise BrokenPipeError(32, 'a socket')")
    assert done.returncode == 1 and b"a socket" in done.stderr


def test_a_full_disk_is_one_line():
    done = run("print('x')", redirect="> /dev/full")
    assert done.returncode == 71
    assert done.stderr == (b"tpdet: standard output cannot be written: No space left on device\n")


def test_a_standard_error_without_room_keeps_the_exit_code():
    """There is no line to read, and the code is still that of the error."""
    assert run("raise NotFoundError('none')", redirect="2> /dev/full").returncode == 66
    assert run("print('x')", redirect="> /dev/full 2>&1").returncode == 71


def test_a_file_that_a_command_writes_itself_is_no_standard_stream():
    """Its write fails without a name: the end of a command that keeps what is printed tells."""
    for code in (
        "open('/dev/full', 'w', 1).write('x\\n')",
        "print(1); open('/dev/full', 'wb', 0).write(b'x')",
    ):
        done = run(code)
        assert done.returncode == 71
        assert done.stderr.startswith(b"tpdet: a file's disk is full (No space left on device): ")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_not_given_to_files_that_are_opened(closed, tmp_path):
    """The next file that is opened gets the lowest free descriptor, and with it what is printed."""
    path = tmp_path / "found"
    code = (
        "file = open(sys.argv[1], 'w'); print('to the reader'); print('e', file=sys.stderr); "
        "print(sys.stdin.read(), file=sys.stderr); file.write(str(file.fileno() > 2))"
    )
    done = run(code, str(path), redirect=closed, input=b"")
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "True"
    assert (done.stdout == b"to the reader\n") == (">&-" not in closed.replace("2>&-", ""))


def test_a_locale_without_letters_escapes_what_is_printed_and_leaves_json_alone():
    done = run(r"print('Gr\xfc\xdfe'); print_utf8(['\"Gr\xfc\xdfe\"'])", env=PLAIN)
    assert done.stdout == b"Gr\\xfc\\xdfe\n" + '"Grüße"\n'.encode()


def test_texts_reach_a_command_in_a_locale_without_letters():
    code = "print_utf8([argument_text(sys.argv[1]), sys.stdin.read()])"
    done = run(code, "Grüße 😀", env=PLAIN, input="né".encode())
    assert done.stdout == "Grüße 😀\nné\n".encode()


def test_an_argument_that_is_no_utf8_is_refused():
    assert argument_text("plain é") == "plain é"
    with pytest.raises(UsageError, match=r"the text 'caf\\udce9' is no UTF-8"):
        argument_text(os.fsdecode(b"caf\xe9"))


def test_the_command_ends_so():
    """Its own output, not that of a function given here."""
    command = [sys.executable, "-m", "tpdet", "serve", "--print-limits"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    running.stdout.close()
    assert (running.stderr.read(), running.wait()) == (b"", 141)
