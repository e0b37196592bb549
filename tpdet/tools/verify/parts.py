"""Lists the worlds of one verification, and runs them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from tpdet.comm.device import resolve_device
from tpdet.errors import TpdetError
from tpdet.tools.verify.progress import RunProgress
from tpdet.tools.verify.room import needed_bytes
from tpdet.tools.verify.spec import VerifySpec, WorldReport
from tpdet.tools.worlds.launchers import SEEN, Launchers
from tpdet.tools.worlds.placement import Place, gpu_names, run_placed
from tpdet.tools.worlds.room import gpus_here, smallest
from tpdet.tools.worlds.ways import USUAL, LaunchWay
from tpdet.tools.worlds.worlds import run_world

_KERNEL_CACHE = "TRITON_CACHE_DIR"


@dataclass(frozen=True)
class Part:
    """One world: a tensor-parallel size, the part of the relations that it runs, and its way."""

    tp: int
    name: str
    way: LaunchWay = USUAL

    @property
    def folder(self) -> str:
        """The name of its folder."""
        way = self.way
        return f"tp{self.tp}.{self.name}.{way.launcher}.{way.transport}.{way.nodes}"


@dataclass(frozen=True)
class WorldRuns:
    """How worlds run: who is told, which launchers start them, and how many may share a GPU.

    progress: goes on counting from the worlds of other models; None: counts these alone.
    """

    console: Console
    launchers: Launchers | None = None
    worlds_per_gpu: int = 1
    progress: RunProgress | None = None


def parts_of(spec: VerifySpec, worlds: Sequence[tuple[int, LaunchWay]]) -> list[Part]:
    """Every world of a verification, by size and way; the first runs the reference.

    The part "fresh" also runs the relations without graphs, which saves a third start. The part
    "cache" needs other processes, for its empty kernel cache. Both start each size in its first way
    only, because every other way uses new processes anyway.
    """
    others = {"fresh", "eager", "gather", "experts", "packed"}
    names = ["fresh"] if others & set(spec.relations) else []
    names += ["cache"] if "cache" in spec.relations else []
    first: dict[int, LaunchWay] = {}
    for tp, way in worlds:
        first.setdefault(tp, way)
    again = [Part(tp, name, way) for name in names for tp, way in first.items()]
    return [Part(tp, "steps", way) for tp, way in worlds] + again


def run_worlds(
    spec: VerifySpec, worlds: Sequence[tuple[int, LaunchWay]], runs: WorldRuns, folder: Path
) -> list[WorldReport]:
    """Run every world, side by side where they fit; reports in the order of `parts_of`.

    Raises TpdetError when a world fails (with the end of its log), or did not run as specified.
    """
    parts = parts_of(spec, worlds)
    progress = runs.progress or RunProgress(runs.console, len(parts))
    on_gpus = resolve_device(spec.device) == "cuda"
    gpus = gpus_here() if on_gpus else []
    needs, memory = [], 0
    if gpus and runs.worlds_per_gpu > 1:
        needs = [needed_bytes(spec, part.tp, part.name, len(gpus)) for part in parts]
        memory = smallest(gpus).total

    seconds = [0.0] * len(parts)

    def start(index: int, on: Place) -> None:
        part = parts[index]
        where = f" on {', '.join(on.gpus)}" if on.gpus else ""
        how = "" if part.way == USUAL else f", {part.way}"
        what = f"{Path(spec.model).name}, TP {part.tp}, {part.name}{how}{where}"
        began = time.monotonic()
        with progress.watched(what, folder / part.folder):
            _run(part, spec, on.environment, folder / part.folder, runs.launchers)
        seconds[index] = time.monotonic() - began

    sizes = [part.tp for part in parts]
    run_placed(sizes, start, gpu_names(len(gpus)), runs.worlds_per_gpu, needs, memory)
    paths = [folder / part.folder / "report.json" for part in parts]
    reports = [msgspec.json.decode(path.read_bytes(), type=WorldReport) for path in paths]
    for part, report in zip(parts, reports, strict=True):
        if difference := otherwise(part, spec, report):
            raise TpdetError(f"TP {part.tp}, {part.way}: {difference}")
        if report.seen is not None and report.seen.by_mpi:
            said = (
                f"TP {part.tp}, {part.name}, {part.way}: tensors travelled by {report.seen.by_mpi}"
            )
            runs.console.print(said, style="dim", highlight=False)
        for said in report.left_out:
            runs.console.print(f"left out, {said}", style="dim", highlight=False)
    return [
        msgspec.structs.replace(report, part=part.name, seconds=lasted)
        for report, part, lasted in zip(reports, parts, seconds, strict=True)
    ]


def otherwise(part: Part, spec: VerifySpec, report: WorldReport) -> str | None:
    """Describes how a world did not run as specified, so that it proves nothing; else None."""
    way, seen = part.way, report.seen
    if seen is None or (report.tp, report.way) != (part.tp, way):
        return f"a world of TP {report.tp}, {report.way}, reported in its place"
    if seen.launcher not in SEEN[way.launcher]:
        return f"its ranks were started by {seen.launcher or 'nobody'}"
    if seen.nodes != way.nodes:
        return f"its ranks lie on {seen.nodes} nodes"
    if bool(seen.by_mpi) != (way.transport == "mpi" and part.tp > 1):
        return f"tensors were {'' if seen.by_mpi else 'not '}carried by MPI"
    several = 1 < way.nodes < part.tp and "fold" in spec.row_layers
    if bool(seen.node_folds) != several:
        return f"{seen.node_folds} sums were folded in two levels"
    return None


def _run(
    part: Part,
    spec: VerifySpec,
    environment: dict[str, str],
    folder: Path,
    launchers: Launchers | None,
) -> None:
    folder.mkdir()
    own = msgspec.structs.replace(spec, part=part.name, way=part.way)
    (folder / "spec.json").write_bytes(msgspec.json.encode(own))
    cache = folder / "kernels"
    if part.name == "cache":
        cache.mkdir()
        environment |= {_KERNEL_CACHE: str(cache)}
    run_world(
        part.tp, "tpdet.tools.verify.rank", [str(folder)], folder, environment, part.way, launchers
    )
    if not (folder / "report.json").exists():
        raise TpdetError(
            f"TP {part.tp}, {part.way}: its ranks left no report in {folder}: ranks on other hosts "
            "have to see this folder, set TMPDIR to one that all share"
        )
    if part.name == "cache" and not any(cache.iterdir()):
        raise TpdetError(f"TP {part.tp}: no kernel was compiled into the empty cache {cache}")
