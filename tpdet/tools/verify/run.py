"""Runs `tpdet verify`: worlds of every tensor-parallel size and way, then the comparison."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tpdet.checkpoint.model_config import FAMILY_NAMES, load_model_config
from tpdet.checkpoint.model_config.fit import check_ranks
from tpdet.checkpoint.model_config.known_shapes import directory_of
from tpdet.checkpoint.model_config.pooling import load_for_task
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import resolve_device
from tpdet.config import EngineConfig
from tpdet.kernels.order import DEFAULT_LEAVES, K_GROUP, PAGE_TOKENS
from tpdet.launch.life.signals import raising
from tpdet.speculative.draft_model.pair import read_draft_model
from tpdet.tools.measurement.results_file import append_record, run_record, this_command
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.verify.compare import Relation, compare
from tpdet.tools.verify.page import write_page
from tpdet.tools.verify.parts import WorldRuns, parts_of, run_worlds
from tpdet.tools.verify.progress import RunProgress
from tpdet.tools.verify.relations import that_apply, that_apply_to
from tpdet.tools.verify.report import print_matrix, result_rows, sizes_without_difference
from tpdet.tools.verify.results import runs_of
from tpdet.tools.verify.room import check_worlds
from tpdet.tools.verify.spec import VerifySpec
from tpdet.tools.worlds.launchers import find_launchers
from tpdet.tools.worlds.room import gpus_here
from tpdet.tools.worlds.ways import USUAL, LaunchWay, Ways, choose

_PAST_PAGES = 20  # tokens
_SECONDS_A_RUN = 8.0
"""A run of a bare verification's tiny model takes so long on two idle cores."""


@dataclass(frozen=True)
class ResultFiles:
    """What is written of a verification: `output` is appended to, `html` is a page of its runs."""

    output: Path | None = None
    html: Path | None = None
    records: list[dict[str, Any]] = field(default_factory=list)

    def add(self, record: dict[str, Any]) -> None:
        """Write a run, and the page of all runs so far."""
        self.records.append(record)
        if self.output is not None:
            append_record(self.output, "verify", record)
        if self.html is not None:
            write_page(self.html, runs_of(self.records))


def verify(
    spec: VerifySpec, worlds: Sequence[tuple[int, LaunchWay]], runs: WorldRuns, files: ResultFiles
) -> list[Relation]:
    """Verify one model in every way, print the matrix, write `files`. Raises TpdetError."""
    began, clock = datetime.now(UTC), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tpdet-verify-") as name:
        folder = Path(name)
        reports = run_worlds(spec, worlds, runs, folder)
        relations = compare(reports, folder)
    model = Path(spec.model).name
    print_matrix(model, relations, list(dict.fromkeys(tp for tp, _ in worlds)), runs.console)
    rows = result_rows(model, relations, spec.control)
    largest = max((report.machine for report in reports), key=lambda where: where.gpus)
    files.add(
        run_record("verify", largest, this_command(), rows)
        | {
            "began": began.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - clock, 1),
            "fingerprints": reports[0].fingerprints,
            "worlds": [
                {"tp": report.tp, "part": report.part, "seconds": round(report.seconds, 1)}
                | asdict(report.way)
                for report in reports
            ],
        }
    )
    for relation in relations:
        if relation.difference is not None:
            runs.console.print(
                f"{relation.dtype} {relation.mode}, {relation.circumstance}, "
                f"TP {relation.tp}{named(relation.way)}: {relation.difference}",
                style="red",
                highlight=False,
            )
            break
    return relations


def named(way: LaunchWay) -> str:
    """A way as part of a sentence; "" for the usual one."""
    return "" if way == USUAL else f" ({way})"


def make_family(family: str, folder: Path, seed: int, leaves: int | None = None) -> Path:
    """Write a tiny random model of a family, with at least `leaves` leaves; its folder."""
    directory = folder / f"tiny-{family}"
    more = leaves is not None and leaves > DEFAULT_LEAVES
    heads, inner = (leaves, leaves * K_GROUP) if leaves and more else (8, 128)
    make_model(
        directory,
        like=family,
        hidden=256,
        layers=2,
        heads=heads,
        intermediate=-(-384 // inner) * inner,
        seed=seed,
    )
    return directory


def with_far_probe(spec: VerifySpec) -> VerifySpec:
    """With one more probe where the model has windows: pages lie between its window and page 0."""
    windows = [w for w in load_model_config(spec.model).windows if w is not None]
    if not windows:
        return spec
    far = 2 * PAGE_TOKENS + min(windows) + _PAST_PAGES
    return msgspec.structs.replace(spec, prompt_lengths=(*spec.prompt_lengths, far))


def verify_all(
    models: Sequence[str],
    spec: VerifySpec,
    tps: Sequence[int],
    files: ResultFiles | None,
    worlds_per_gpu: int = 1,
    ways: Ways | None = None,
    families: Sequence[str] = FAMILY_NAMES,
) -> int:
    """Verify each model, or tiny ones of `families`; returns 1 on a difference, else 0.

    A control must differ at every size above 1; if it does not, it returns 0. Raises UsageError or
    NotFoundError, before any work, for ways that are impossible here.
    """
    console = Console()
    device = resolve_device(spec.device)
    chosen_worlds = choose(ways or Ways(), tps, device, spec.control)
    launchers = find_launchers([way for _, way in chosen_worlds.worlds])
    for reason, count in chosen_worlds.left_out.items():
        console.print(f"left out, {count} worlds: {reason}", style="dim", highlight=False)
    chosen = that_apply(spec.relations, device, spec.control)
    spec = msgspec.structs.replace(spec, relations=chosen)
    relations: list[Relation] = []
    worlds = chosen_worlds.worlds
    count = len(parts_of(spec, worlds)) * (len(models) or len(families))
    short = not models and device == "cpu" and len(families) == 1
    progress = RunProgress(console, count, _SECONDS_A_RUN if short else None)
    runs = WorldRuns(console, launchers, worlds_per_gpu, progress)
    with raising(), tempfile.TemporaryDirectory(prefix="tpdet-models-") as name:
        folder = Path(name)
        names = [directory_of(model, spec.load_format, folder) for model in models] or [
            str(make_family(f, folder, spec.seed, spec.leaves)) for f in families
        ]
        specs = [msgspec.structs.replace(spec, model=model) for model in names]
        specs = specs if models else [with_far_probe(one) for one in specs]
        specs = [_checked(one, worlds, device) for one in specs]
        progress.plan()
        for one in specs:
            relations += verify(one, worlds, runs, files or ResultFiles())
    different = sum(not relation.equal for relation in relations)
    verdict = "all equal" if not different else f"{different} DIFFERENT"
    console.print(f"{len(relations)} relations, {verdict}", style="red" if different else "green")
    if spec.control:
        for tp in sizes_without_difference(relations):
            console.print(f"the control shows no difference at TP {tp}", style="red")
            different = 0
    return 1 if different else 0


def _checked(spec: VerifySpec, worlds: Sequence[tuple[int, LaunchWay]], device: str) -> VerifySpec:
    """The spec with the relations that apply to its model.

    Refuses, before a world starts, a model that cannot be loaded, or not at every size.
    """
    directory = resolve_model(spec.model)
    for dtype in spec.dtypes:
        config, pooling = load_for_task(directory, dtype, spec.task)
        for tp, _ in worlds:
            check_ranks(config, tp, spec.leaves)
        if spec.draft_model is not None:
            pair = {"model": spec.model, "draft_model": spec.draft_model, "dtype": dtype}
            read_draft_model(EngineConfig.from_values(**pair))
    if device == "cuda":
        check_worlds(spec, worlds, gpus_here())
    row = None if pooling is None else pooling.row
    quantised = (
        spec.load_format != "dummy"
        and directory.is_dir()
        and read_stored_form(directory).quantisation is not None
    )
    chosen = that_apply_to(spec.relations, row, quantised, config.linear is not None)
    return msgspec.structs.replace(spec, relations=chosen)
