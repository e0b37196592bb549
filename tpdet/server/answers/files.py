"""The files of cached answers: written whole or not at all, the least recently used leave first.

One answer is one file, `XX/DIGEST-KEY` with the first two digits of its request digest: a line with
a checksum of the rest, then the rest. The processes of one server share a directory, and count its
bytes together.
"""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import blake3

from tpdet.errors import NotPermittedError
from tpdet.server.front.tally import SharedTally

_log = logging.getLogger("tpdet.server")
_FORM = b"tpdet-answer-1 "
_DOMAIN = b"tpdet-answer-key-1\n"
_KEY_DIGITS = 32
_UNFINISHED = ".new-"
_BYTES = "answer_cache_bytes"
_SPARE = 16
"""Where the limit is passed, one part in so many is freed beyond it: fewer looks at all files."""


class AnswerName(NamedTuple):
    """What an answer is kept under; salt: the request's `cache_salt`, owner: as `owner_of` says."""

    request_digest: str
    salt: str
    owner: str

    @property
    def path(self) -> Path:
        """The file, in the directory of all."""
        parts = self.salt.encode("utf-8", "surrogatepass"), self.owner.encode()
        data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        key = blake3.blake3(_DOMAIN + data).hexdigest()[:_KEY_DIGITS]
        return Path(self.request_digest[:2], f"{self.request_digest}-{key}")


def make_writable(directory: Path) -> None:
    """Make the directory where there is none. Raises NotPermittedError where none can be."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise NotPermittedError(
            f"--answer-cache {directory} cannot be written ({error.strerror}): name a directory of "
            "this user's, or leave it out"
        ) from error


class AnswerFiles:
    """A directory of answers of at most `limit` bytes. Its methods wait for the disk.

    What cannot be read or written is no fault of a request: it is logged, once.
    """

    def __init__(self, directory: Path, limit: int, tally: SharedTally) -> None:
        """Make the directory where there is none. Raises NotPermittedError where none can be."""
        self._directory, self._limit, self._tally = directory, limit, tally
        self._complained = False
        make_writable(directory)

    def read(self, name: AnswerName) -> bytes | None:
        """An answer, used just now; None if there is none. A damaged one is removed."""
        path = self._directory / name.path
        try:
            data = path.read_bytes()
            line, _, content = data.partition(b"\n")
            if line != _FORM + blake3.blake3(content).hexdigest().encode():
                _log.warning("a cached answer is damaged: it is removed, and computed again")
                self._remove(path, len(data))
                return None
            _use(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(error)
            return None
        return content

    def write(self, name: AnswerName, content: bytes) -> None:
        """Keep an answer, unless it is there; then remove others, if they are too many bytes."""
        path = self._directory / name.path
        data = _FORM + blake3.blake3(content).hexdigest().encode() + b"\n" + content
        if len(data) > self._limit:
            return
        try:
            if path.exists():
                _use(path)
                return
            path.parent.mkdir(mode=0o700, exist_ok=True)
            number, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, dir=path.parent)
            try:
                with open(number, "wb") as file:
                    file.write(data)
                _use(Path(unfinished))
                os.replace(unfinished, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
                raise
        except OSError as error:
            self._complain(error)
            return
        self._tally.add(_BYTES, len(data))
        if self._tally.total(_BYTES) > self._limit:
            self.tidy()

    def remove(self, name: AnswerName) -> None:
        """Remove an answer, if it is there."""
        path = self._directory / name.path
        with contextlib.suppress(OSError):
            self._remove(path, path.stat().st_size)

    def tidy(self, unfinished: bool = False) -> None:
        """Count all bytes, and remove the answers that were used longest ago if they are too many.

        unfinished: remove what a server that was killed left half written, too.
        """
        files = []
        for entry in self._entries():
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if not entry.name.startswith(_UNFINISHED):
                    files.append((status.st_mtime_ns, entry.path, status.st_size))
                elif unfinished:
                    os.unlink(entry.path)
        size = sum(size for _, _, size in files)
        self._tally.add(_BYTES, size - self._tally.total(_BYTES))
        if size <= self._limit:
            return
        for _, path, bytes_ in sorted(files):
            size -= self._remove(Path(path), bytes_)
            if size <= self._limit - self._limit // _SPARE:
                break

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(self._directory) as folders:
                for folder in sorted(folders, key=lambda one: one.name):
                    if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                        with os.scandir(folder.path) as entries:
                            yield from entries
        except OSError as error:
            self._complain(error)

    def _remove(self, path: Path, size: int) -> int:
        """Remove a file; the bytes that this freed."""
        try:
            path.unlink()
        except FileNotFoundError:
            return 0
        except OSError as error:
            self._complain(error)
            return 0
        self._tally.add(_BYTES, -size)
        return size

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            _log.warning(
                "--answer-cache: answers cannot be kept or read (%s); requests are computed as "
                "without it",
                error.strerror,
            )


def erase_answers(directory: Path, request_digest: str) -> int:
    """Remove the answers to a request, whosever they are; how many they were.

    A server that runs on the directory goes on counting them until it next looks at all files.
    """
    paths = [*(directory / request_digest[:2]).glob(f"{request_digest}-*")]
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _use(path: Path) -> None:
    """Note that a file is used now."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
