"""A directory of compiled kernels, which `tpdet compile` writes and a start reads; Triton's cache.

    DIR/kernels.json           what they were compiled by and for, and every file's size and SHA-256
    DIR/<key>/<kernel>.json    Triton's description of a kernel, by the key of Triton's cache
    DIR/<key>/<kernel>.cubin   its code

What lies here is executed. So nobody but its owner, who is this user or root, may be able to write
to it, and every byte is what was compiled: else a start is refused. Triton's own cache, to which a
start writes, is refused too if others could have written to it or a file in it is cut short.
Imports neither torch nor Triton: `tpdet serve` looks before it starts ranks.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpdet.errors import (
    CheckpointError,
    DisagreementError,
    NotFoundError,
    NotPermittedError,
    UsageError,
)

MANIFEST = "kernels.json"
FORMAT = 1
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
_ELF_HEADER = 64
_MOST_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Facts:
    """What compiled kernels depend on. capability: of the GPU, such as "9.0"; sources: a digest."""

    triton: str
    capability: str
    sources: str
    contracts: Mapping[str, str]
    """The contract id by tensor-parallel size, "1", "2", ...; sizes that were not compiled lack."""


@dataclass(frozen=True)
class KernelDirectory:
    """A directory whose files were found as its manifest says."""

    path: Path
    facts: Facts
    kernels: int

    def check_fits(self, contract: str, ranks: int, capability: str) -> None:
        """Raise DisagreementError, naming what differs, unless a start of these may use it.

        capability: of this machine's GPU; empty where it is not known yet.
        """
        here = {"Triton": triton_version(), "tpdet's kernel sources": sources_digest()}
        made = {"Triton": self.facts.triton, "tpdet's kernel sources": self.facts.sources}
        if capability:
            here["the GPU's compute capability"] = capability
            made["the GPU's compute capability"] = self.facts.capability
        for name, value in here.items():
            if made[name] != value:
                raise self._differs(f"{name}: compiled for {made[name][:16]}, here is {value[:16]}")
        compiled = self.facts.contracts.get(str(ranks))
        if compiled is None:
            sizes = ", ".join(self.facts.contracts)
            raise self._differs(f"compiled for tensor-parallel size {sizes}, {ranks} ranks start")
        if compiled != contract:
            raise self._differs(f"contract: compiled for {compiled[:16]}, here is {contract[:16]}")

    def _differs(self, what: str) -> DisagreementError:
        return DisagreementError(
            f"kernel cache {self.path}: {what}: make it anew with tpdet compile, on this version, "
            "or leave --kernel-cache out"
        )


def write_manifest(path: Path, facts: Facts) -> None:
    """Describe the files below `path`; last, so that an unfinished directory has none."""
    files = {
        str(file.relative_to(path)): [file.stat().st_size, _sha256(file)]
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    body = {"format": FORMAT, **asdict(facts), "files": files}
    (path / MANIFEST).write_text(json.dumps(body, indent=1) + "\n")


def check_caches(
    name: str | None, contract: str, ranks: int, device: str, capability: str = ""
) -> KernelDirectory | None:
    """Check what a start on "cpu" or "cuda" would execute; the directory of that name, if one is.

    contract: the strict one's id, of a start of `ranks` ranks; capability: of the GPU, such as
    "9.0", if it is known. Raises NotFoundError, NotPermittedError, CheckpointError and
    DisagreementError for a cache that cannot be trusted or does not fit, UsageError on a CPU.
    """
    if device == "cpu":
        if name is not None:
            raise UsageError(f"--kernel-cache {name} is for a GPU: leave it out on the CPU")
        return None
    directory = None
    if name is not None:
        directory = read_directory(name)
        directory.check_fits(contract, ranks, capability)
    check_own_cache(own_cache())
    return directory


def read_directory(name: str) -> KernelDirectory:
    """Check and read a compiled directory.

    Raises NotFoundError; NotPermittedError for what others could have written; CheckpointError for
    a directory that is not one, or whose files are not those that were compiled.
    """
    path = Path(name)
    if not path.is_dir():
        raise NotFoundError(f"kernel cache {path} is no directory: make one with tpdet compile")
    paths = [path, *_below(path)]
    for part in paths:
        _check_owner(part, path)
    facts, files = _read_manifest(path)
    there = {str(part.relative_to(path)) for part in paths if part.is_file()} - {MANIFEST}
    for file in sorted(there ^ set(files)):
        what = "is not one of its compiled files" if file in there else "is missing"
        raise _damaged(path, f"{file} {what}")
    for file, (size, digest) in files.items():
        bytes_there = (path / file).stat().st_size
        if bytes_there != size:
            raise _damaged(path, f"{file} has {bytes_there} bytes of {size}")
        if _sha256(path / file) != digest:
            raise _damaged(path, f"{file} does not hold what was compiled")
    return KernelDirectory(path, facts, sum(file.endswith(".cubin") for file in files))


def check_own_cache(path: Path) -> None:
    """Check the folder that Triton compiles into, which is made, for this user alone, if need be.

    Raises NotPermittedError for what others could have written, CheckpointError for a kernel that
    is cut short.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    entered = _check_owner(path, path).st_mode & _OTHERS_ENTER
    for part in _below(path):
        if part.name.startswith("tmp.") or part.parent.name.startswith("tmp."):
            continue  # another process is writing it
        try:
            if entered:
                _check_owner(part, path)
            if part.suffix == ".cubin":
                _check_whole(part, path)
        except FileNotFoundError:
            continue


def own_cache() -> Path:
    """The folder that Triton compiles into, by its environment variables."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


def triton_version() -> str:
    """The version of the Triton that this Python imports; "none" without one."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def sources_digest() -> str:
    """SHA-256 (hex) over the names and bytes of all files of `tpdet.kernels`: code and tables."""
    spec = importlib.util.find_spec("tpdet.kernels")
    if spec is None or not spec.submodule_search_locations:
        raise NotFoundError("tpdet.kernels is missing: install tpdet anew")
    root = Path(spec.submodule_search_locations[0]).resolve()
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        if file.suffix in (".py", ".json"):
            digest.update(f"{file.relative_to(root)}\0{_sha256(file)}\n".encode())
    return digest.hexdigest()


def _below(path: Path) -> Iterator[Path]:
    """Every file and folder below, links not followed; what vanishes meanwhile is left out."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            yield Path(folder, name)


def _check_owner(part: Path, whole: Path) -> os.stat_result:
    """Raise NotPermittedError if others could have written a file or folder."""
    status = part.lstat()
    if stat.S_ISLNK(status.st_mode) and part != whole:
        raise NotPermittedError(
            f"kernel cache {whole}: {part.name} is a link: what it holds is executed, put the file "
            "itself there"
        )
    if part == whole:
        status = part.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise NotPermittedError(
            f"kernel cache {whole}: {part} belongs to user {status.st_uid}, and what it holds is "
            f"executed: chown it to {os.geteuid()} or use a folder of your own"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise NotPermittedError(
            f"kernel cache {whole}: {part} has mode {stat.S_IMODE(status.st_mode):04o}, others may "
            "write to it, and what it holds is executed: look at it, then chmod -R go-w it"
        )
    return status


def _check_whole(cubin: Path, whole: Path) -> None:
    """Raise CheckpointError for compiled code that ends before its own tables do."""
    with cubin.open("rb") as file:
        head = file.read(_ELF_HEADER)
        size = os.fstat(file.fileno()).st_size
    end = _ELF_HEADER
    if len(head) == _ELF_HEADER and head.startswith(b"\x7fELF"):
        programs, sections = struct.unpack_from("<QQ", head, 32)
        of_program, count, of_section, sections_count = struct.unpack_from("<4H", head, 54)
        end = max(programs + of_program * count, sections + of_section * sections_count)
    if size < end:
        raise CheckpointError(
            f"kernel cache {whole}: {cubin.relative_to(whole)} is cut short, {size} bytes of "
            f"{end}: delete {cubin.parent}"
        )


def _read_manifest(path: Path) -> tuple[Facts, dict[str, tuple[int, str]]]:
    """Facts, and size and digest by file."""
    file = path / MANIFEST
    if not file.is_file():
        raise _damaged(path, f"it has no {MANIFEST}")
    try:
        with file.open("rb") as opened:
            body: Any = json.loads(opened.read(_MOST_MANIFEST_BYTES))
        if body["format"] != FORMAT:
            raise _damaged(path, f"{MANIFEST} has format {body['format']!r}, not {FORMAT}")
        facts = Facts(
            str(body["triton"]),
            str(body["capability"]),
            str(body["sources"]),
            {str(size): str(contract) for size, contract in body["contracts"].items()},
        )
        files = {str(name): (int(size), str(sha)) for name, (size, sha) in body["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _damaged(path, f"{MANIFEST} is damaged ({type(error).__name__})") from error
    if not files or not facts.contracts:
        raise _damaged(path, f"{MANIFEST} names no kernels")
    return facts, files


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"kernel cache {path}: {what}: make it anew with tpdet compile")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
