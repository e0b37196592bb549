"""The page of `tpdet verify`: what a results file says, for people."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tpdet
from tpdet.audit.fingerprint import read_fingerprint
from tpdet.tools.report.report import share, write_report
from tpdet.tools.verify.compare import LogitDifference, Relation
from tpdet.tools.verify.progress import duration
from tpdet.tools.verify.report import matrices, sizes_without_difference
from tpdet.tools.verify.results import VerifyRow, VerifyRun
from tpdet.tools.worlds.ways import USUAL

MOST_RELATIONS = 5000
"""Relations that a page's matrices show; those that differ come first where there are more."""
MOST_RUNS = 100
MOST_SIZES = 16
"""Columns of a matrix."""
MOST_DIFFERENCES = 50
"""First differences that are listed of a run, each with the relations that have it."""
MOST_WORLDS = 64
_BITS, _DIGITS = 32, 8
_GAPS = (1, 9)
"""Bits behind which a number's picture has a gap: sign, then exponent."""


@dataclass(frozen=True)
class RunView:
    """What a run says of one model, as the page shows it."""

    run: VerifyRun
    model: str
    control: bool
    relations: tuple[Relation, ...]
    different: tuple[Relation, ...]
    silent: tuple[int, ...]
    """Sizes above 1 at which a control shows no difference."""

    @property
    def good(self) -> bool:
        """Whether it came out as it must."""
        return not self.silent if self.control else not self.different


def write_page(path: Path, runs: Sequence[VerifyRun]) -> None:
    """Write the page of some runs, the newest first. Raises NotPermittedError."""
    views = [view for run in reversed(runs) for view in _views(run)]
    good, heading, text = _verdict(views)
    shown = [*_shown_runs(views)]
    write_report(
        path,
        "tpdet.tools.verify/page.html",
        title=f"{heading} · tpdet verify",
        command_name="verify",
        version=tpdet.__version__,
        made=_made(views[0].run),
        good=good,
        heading=heading,
        text=text,
        tiles=[*_tiles(views)],
        runs=shown,
        hidden=len(views) - len(shown),
        digits=_DIGITS,
        usual=USUAL,
    )


def _views(run: VerifyRun) -> Iterator[RunView]:
    """A view for each model; a run of `tpdet verify` has one."""
    by_model: dict[str, list[VerifyRow]] = {}
    for row in run.rows:
        by_model.setdefault(row.model, []).append(row)
    for model, rows in by_model.items():
        control = any(row.control for row in rows)
        yield RunView(
            run=run,
            model=model,
            control=control,
            relations=tuple(rows),
            different=tuple(one for one in rows if not one.equal),
            silent=tuple(sizes_without_difference(rows)) if control else (),
        )


def _verdict(views: Sequence[RunView]) -> tuple[bool, str, str]:
    """Whether all is as it must be, in a few words, and in a sentence."""
    relations = [one for view in views if not view.control for one in view.relations]
    different = [one for one in relations if not one.equal]
    controls = [view for view in views if view.control]
    silent = [view for view in controls if not view.good]
    if different:
        heading = f"{len(different):,} of {len(relations):,} relations differ"
        return False, heading, f"The first: {_sentence(different[0])}."
    if silent:
        sizes = ", ".join(map(str, silent[0].silent))
        text = "Stock arithmetic was equal there, so this run cannot tell equal from different."
        return False, f"The control shows no difference at TP {sizes}", text
    if not relations:
        count = sum(len(view.different) for view in controls)
        total = sum(len(view.relations) for view in controls)
        text = (
            f"{count:,} of {total:,} relations of a stock all-reduce and stock products differ, "
            "some at every size above 1. So the comparison sees what it has to see."
        )
        return True, "The control differs, as it must", text
    sizes = ", ".join(map(str, _sizes(relations)))
    more = " The controls differ, as they must." if controls else ""
    return (
        True,
        "Every bit is equal",
        (
            f"{len(relations):,} relations at TP {sizes}: the logits of the whole vocabulary, at "
            f"every position of every probe, are those of the reference.{more}"
        ),
    )


def _sentence(relation: Relation) -> str:
    return (
        f"{relation.dtype} {relation.mode}, {relation.circumstance}, TP {relation.tp}: "
        f"{relation.difference or 'its digest is another'}"
    )


def _sizes(relations: Sequence[Relation]) -> list[int]:
    return sorted({one.tp for one in relations})


def _made(run: VerifyRun) -> str:
    """When a run began, as far as it says so."""
    if run.began is None:
        return run.date
    try:
        return datetime.fromisoformat(run.began).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):
        return run.date


def _tiles(views: Sequence[RunView]) -> Iterator[tuple[str, str, str]]:
    relations = [one for view in views for one in view.relations]
    different = sum(not one.equal for one in relations)
    sizes = _sizes(relations)
    yield "relations equal", f"{len(relations) - different:,}", "" if different else "good"
    expected = all(view.control for view in views if view.different)
    if different:
        label = "differ in a control, as they must" if expected else "relations differ"
        yield label, f"{different:,}", "" if expected else "bad"
    yield "tensor-parallel sizes", ", ".join(map(str, sizes[:MOST_SIZES])), ""
    devices = [*dict.fromkeys(_device(view.run) for view in views)]
    yield "device", devices[0] + " and others" * (len(devices) > 1), ""
    yield "rows of logits compared", f"{sum(one.positions for one in relations):,}", ""
    seconds = [view.run.seconds for view in views if view.run.seconds is not None]
    if seconds:
        yield "time", duration(sum(seconds)), ""
    elif len(views) > 1:
        yield "runs", f"{len(views):,}", ""


def _shown_runs(views: Sequence[RunView]) -> Iterator[dict[str, Any]]:
    """The runs of the page, until their matrices have too many relations."""
    left = MOST_RELATIONS
    for view in views[:MOST_RUNS]:
        if left <= 0:
            return
        yield _run(view, left)
        left -= len(view.relations)


def _run(view: RunView, most: int) -> dict[str, Any]:
    relations = view.relations
    sizes = _sizes(relations)[:MOST_SIZES]
    if len(relations) > most:
        relations = (*sorted(relations, key=lambda one: one.equal)[:most],)
    relations = tuple(one for one in relations if one.tp in sizes)
    run, alike = view.run, [*_alike(view.different)]
    return {
        "model": view.model,
        "control": view.control,
        "good": view.good,
        "note": run.note,
        "command": run.command,
        "matrices": [*matrices(relations, sizes)],
        "hidden": len(view.relations) - len(relations),
        "first": _located(view.different[0]) if view.different else None,
        "different": alike[:MOST_DIFFERENCES],
        "more": max(0, len(alike) - MOST_DIFFERENCES),
        "facts": [*_facts(run)],
        "worlds": _worlds(run),
    }


def _alike(relations: Sequence[Relation]) -> Iterator[dict[str, Any]]:
    """Relations of one size that differ first in the same place, together."""
    groups: dict[tuple[object, ...], list[Relation]] = {}
    for one in relations:
        key = one.dtype, one.mode, one.tp, one.positions, one.difference
        groups.setdefault(key, []).append(one)
    for alike in groups.values():
        counts = sorted({one.differing for one in alike})
        ways = {one.way for one in alike} != {USUAL}
        names = (f"{one.circumstance} ({one.way})" if ways else one.circumstance for one in alike)
        yield {
            "relation": alike[0],
            "circumstances": ", ".join(names),
            "counted": counts[0] > 0,
            "least": counts[0],
            "most": counts[-1],
            "share": share(counts[-1], alike[0].positions),
        }


def _located(relation: Relation) -> dict[str, Any]:
    """The first difference, with a picture of both numbers' bits where they are known."""
    logit = relation.logit
    return {"sentence": _sentence(relation), "bits": None if logit is None else _picture(logit)}


def _picture(logit: LogitDifference) -> dict[str, Any]:
    ours, theirs = (f"{int(bits, 16):0{_BITS}b}" for bits in (logit.bits, logit.reference_bits))
    return {
        "rows": [("reference", logit.reference_bits, theirs), ("this run", logit.bits, ours)],
        "flipped": [one != other for one, other in zip(ours, theirs, strict=True)],
        "x": [20 * bit + 18 * sum(bit >= gap for gap in _GAPS) for bit in range(_BITS)],
        "count": (int(ours, 2) ^ int(theirs, 2)).bit_count(),
    }


def _device(run: VerifyRun) -> str:
    return run.gpu if not run.gpus else f"{run.gpus} × {run.gpu}"


def _facts(run: VerifyRun) -> Iterator[tuple[str, str]]:
    yield "device", _device(run)
    versions = {"Python": run.python, "torch": run.torch, "triton": run.triton,
                "driver": run.driver, "commit": run.commit}  # fmt: skip
    yield "versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    for mode, text in list(run.fingerprints.items())[:MOST_SIZES]:
        parts = read_fingerprint(text)
        if parts is None:
            yield mode, text
            continue
        yield f"contract, {mode}", f"{parts.contract}…"
        yield f"weights, {mode}", f"{parts.weights}…"
        yield f"architecture, {mode}", parts.architecture
    yield "began", _made(run)
    if run.seconds is not None:
        yield "took", duration(run.seconds)


def _worlds(run: VerifyRun) -> list[dict[str, Any]]:
    """The worlds, each with its share of the longest."""
    longest = max((world.seconds for world in run.worlds), default=0.0)
    return [
        {"world": world, "share": share(world.seconds, longest)}
        for world in run.worlds[:MOST_WORLDS]
    ]
