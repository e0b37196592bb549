"""The start-up agreement: ranks compare everything that may change a bit, and refuse to differ.

Facts are a flat table of strings. One gather of 32-byte digests is enough when all ranks agree. If
digests differ, the ranks exchange the tables, to name the field and both values.
"""

import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import blake3
import msgspec
import torch

import tpdet
from tpdet.comm.arithmetic_environment import VARIABLES
from tpdet.comm.device import gpu_facts
from tpdet.comm.world.world import World, rank_on_node
from tpdet.errors import DisagreementError

ABSENT = "(not set)"

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "msgspec",
    "blake3",
    "jinja2",
    "pydantic",
)
"""Packages whose code decides bits of an answer: arithmetic, weights, tokens, messages."""

_pairs = msgspec.msgpack.Decoder(list[tuple[str, str]])


def agree(world: World, facts: Mapping[str, str]) -> None:
    """Return if all ranks have the same facts. Collective.

    Raises DisagreementError, the same on every rank: it names the first field in sorted order that
    differs, two ranks with their nodes and values, and how many more fields differ. Raises
    PeerLostError if a rank is lost meanwhile.
    """
    table = msgspec.msgpack.encode(sorted(facts.items()))
    digests = world.gather_bytes(blake3.blake3(table).digest())
    if all(digest == digests[0] for digest in digests):
        return
    tables = [dict(_pairs.decode(data)) for data in world.gather_bytes(table)]
    differences = []
    for field in sorted({name for other in tables for name in other}):
        values = [other.get(field, ABSENT) for other in tables]
        for rank, value in enumerate(values):
            if value != values[0]:
                first, other = rank_on_node(world, 0), rank_on_node(world, rank)
                differences.append(f"{field}: {first} has {values[0]!r}, {other} has {value!r}")
                break
    more = f" ({len(differences) - 1} more fields differ)" if len(differences) > 1 else ""
    raise DisagreementError(
        f"ranks disagree on {differences[0]}{more}: start every rank with the same code, packages, "
        "environment, flags and checkpoint"
    )


def collect_facts(settings: Mapping[str, object], device: str = "cpu") -> dict[str, str]:
    """This rank's facts: code, packages, machine, environment, and `settings` as `config.*`.

    settings: the engine's configuration with its seed, without paths (they may differ from rank to
    rank) and without secrets (values that differ are printed). device: "cpu" or "cuda"; "cuda"
    adds the current GPU, its driver and torch's flags.
    """
    facts = {
        "code": _own_code_digest(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "blas": blas_version(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "float32 matmul precision": _matmul_precision(),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "cuda": str(torch.version.cuda),
        "device": device,
    }
    if device == "cuda":
        facts |= gpu_facts()
    for package in PACKAGES:
        facts[f"package {package}"] = package_version(package)
    for variable in VARIABLES:
        facts[f"environment {variable.name}"] = os.environ.get(variable.name, ABSENT)
    for name, value in settings.items():
        facts[f"config.{name}"] = str(value)
    return facts


def _matmul_precision() -> str:
    """What torch.set_float32_matmul_precision has set; the newer settings where they contradict."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        of_cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        backends = of_cpu, torch.backends.cuda.matmul
        return " ".join(str(backend.fp32_precision) for backend in backends)


def code_digest(root: Path | None = None) -> str:
    """BLAKE3 (hex) over every module below `root` and the JSON beside them, in sorted path order.

    root: a folder; None for the tpdet package. The digest covers each file's relative path, length
    and bytes. JSON in a folder without modules is what was measured on a GPU: no bit is of it.
    Links are followed: in a checkout the folders kernels, comm and launch are links.
    """
    root = Path(tpdet.__file__).parent if root is None else root
    paths = []
    for folder, _, names in os.walk(root, followlinks=True):
        if any(name.endswith(".py") for name in names):
            paths += [Path(folder, name) for name in names if name.endswith((".py", ".json"))]
    digest = blake3.blake3()
    for relative, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        content = path.read_bytes()
        digest.update(f"{relative}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@cache
def _own_code_digest() -> str:
    """This process's code: as it is on disk when the first world starts."""
    return code_digest()


@cache
def package_version(package: str) -> str:
    """The installed version of a distribution, or "(not set)"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ABSENT


def blas_version() -> str:
    """The BLAS that torch was built with, and its version, from torch's build settings."""
    settings = torch.__config__.show()
    name = re.search(r"BLAS_INFO=(\w+)", settings)
    versions = re.findall(
        r"(?:Intel\(R\) (?:oneAPI )?Math Kernel Library Version \S+|OpenBLAS \S+|MKL-DNN v\S+)",
        settings,
    )
    return " · ".join([name.group(1) if name else "unknown", *versions])
