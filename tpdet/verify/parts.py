"""The worlds of one verification: which there are, and running them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from tpdet.comm.device import resolve_device
from tpdet.errors import TpdetError
from tpdet.verify.placement import Place, gpu_names, run_placed
from tpdet.verify.spec import VerifySpec, WorldReport
from tpdet.verify.worlds import run_world

_KERNEL_CACHE = "TRITON_CACHE_DIR"


@dataclass(frozen=True)
class Part:
    """One world: a tensor-parallel size and the part of the relations that it runs."""

    tp: int
    name: str

    @property
    def folder(self) -> str:
        """Its folder's name."""
        return f"tp{self.tp}.{self.name}"


def parts_of(spec: VerifySpec, tps: Sequence[int]) -> list[Part]:
    """Every world of a verification; the first runs the reference.

    "fresh" also runs what needs no graphs, so that it costs no third start; an empty kernel cache
    needs processes of its own.
    """
    names = ["steps"]
    names += ["fresh"] if {"fresh", "eager", "gather"} & set(spec.relations) else []
    names += ["cache"] if "cache" in spec.relations else []
    return [Part(tp, name) for name in names for tp in tps]


def run_worlds(
    spec: VerifySpec, tps: Sequence[int], worlds_per_gpu: int, console: Console, folder: Path
) -> list[WorldReport]:
    """Run every world, side by side where they fit; reports in the order of `parts_of`.

    Raises TpdetError when a world fails to run (with the end of its log).
    """
    parts = parts_of(spec, tps)
    on_gpus = resolve_device(spec.device) == "cuda"
    names = gpu_names(torch.cuda.device_count()) if on_gpus else []

    def start(index: int, place: Place) -> None:
        part = parts[index]
        where = f" on {', '.join(place.gpus)}" if place.gpus else ""
        console.print(f"{spec.model}: TP {part.tp}, {part.name}{where} ...", style="dim")
        _run(part, spec, place, folder / part.folder)

    run_placed([part.tp for part in parts], start, names, worlds_per_gpu)
    paths = [folder / part.folder / "report.json" for part in parts]
    return [msgspec.json.decode(path.read_bytes(), type=WorldReport) for path in paths]


def _run(part: Part, spec: VerifySpec, place: Place, folder: Path) -> None:
    folder.mkdir()
    mine = msgspec.structs.replace(spec, part=part.name)
    (folder / "spec.json").write_bytes(msgspec.json.encode(mine))
    environment = place.environment
    cache = folder / "kernels"
    if part.name == "cache":
        cache.mkdir()
        environment |= {_KERNEL_CACHE: str(cache)}
    run_world(part.tp, "tpdet.verify.rank", [str(folder)], folder, environment)
    if part.name == "cache" and not any(cache.iterdir()):
        raise TpdetError(f"TP {part.tp}: no kernel was compiled into the empty cache {cache}")
