"""`tpdet verify`: one torchrun world a tensor-parallel size, then the comparison."""

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from tpdet.errors import UsageError
from tpdet.make_model import make_model
from tpdet.model_config import load_model_config
from tpdet.verify.compare import Relation, compare
from tpdet.verify.report import append_run, print_matrix, result_rows
from tpdet.verify.spec import VerifySpec, WorldReport
from tpdet.verify.worlds import run_world
from tpdet.weights.resolve import resolve_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def verify(
    spec: VerifySpec, tps: Sequence[int], console: Console, output: Path | None, command: str
) -> list[Relation]:
    """Verify one model at every size in `tps`; prints the matrix, appends to `output`.

    Raises TpdetError when a world fails to run (with the end of its log).
    """
    with tempfile.TemporaryDirectory(prefix="tpdet-verify-") as name:
        folder = Path(name)
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        reports = []
        for tp in tps:
            console.print(f"{spec.model}: tensor-parallel size {tp} ...", style="dim")
            reports.append(_run_world(tp, folder))
        relations = compare(reports, folder)
    model = Path(spec.model).name
    print_matrix(model, relations, list(tps), console)
    if output is not None:
        rows = result_rows(model, relations, spec.control)
        largest = max((report.machine for report in reports), key=lambda found: found.gpus)
        append_run(output, "verify", largest, command, rows)
    for relation in relations:
        if relation.difference is not None:
            console.print(
                f"{relation.dtype} {relation.fold_order}, {relation.circumstance}, "
                f"TP {relation.tp}: {relation.difference}",
                style="red",
                highlight=False,
            )
            break
    return relations


def make_family(family: str, folder: Path, seed: int) -> Path:
    """A tiny model of a family, for verification without a checkpoint."""
    directory = folder / f"tiny-{family}"
    make_model(directory, like=family, hidden=256, layers=2, intermediate=384, seed=seed)
    return directory


def verify_all(
    models: Sequence[str], spec: VerifySpec, tps: Sequence[int], output: Path | None
) -> int:
    """Verify each model (a tiny one of each family if none is named); 1 on a difference, else 0."""
    console = Console()
    command = shlex.join(["tpdet", *sys.argv[1:]])
    different = checked = 0
    with tempfile.TemporaryDirectory(prefix="tpdet-models-") as name:
        names = list(models) or [str(make_family(f, Path(name), spec.seed)) for f in FAMILIES]
        for model in names:
            for dtype in spec.dtypes:  # what cannot be loaded is refused before a world is started
                load_model_config(resolve_model(model), dtype)
            one = msgspec.structs.replace(spec, model=model)
            relations = verify(one, tps, console, output, command)
            checked += len(relations)
            different += sum(not relation.equal for relation in relations)
    verdict = "all equal" if not different else f"{different} DIFFERENT"
    console.print(f"{checked} relations, {verdict}", style="red" if different else "green")
    return 1 if different else 0


def _run_world(tp: int, folder: Path) -> WorldReport:
    run_world(tp, "tpdet.verify.rank", [str(folder / "spec.json"), str(folder)], folder)
    return msgspec.json.decode((folder / f"tp{tp}.json").read_bytes(), type=WorldReport)


def parse_sizes(text: str) -> tuple[int, ...]:
    """ "1,2,4" as integers. Raises UsageError."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of numbers such as 1,2,4") from error
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{text!r}: sizes start at 1")
    return sizes
