"""`tpdet bench drafts`: steps and tokens/s with drafters, beside those without."""

import argparse
from collections.abc import Iterator

from rich.console import Console

from tpdet.checkpoint.model_config.known_shapes import is_shape
from tpdet.config import EngineConfig
from tpdet.errors import UsageError
from tpdet.speculative.proposers.proposer import DRAFT_MODEL
from tpdet.tools.bench.engine import engine_of
from tpdet.tools.bench.run import run_worlds
from tpdet.tools.bench.spec import BenchResult, DraftsSpec
from tpdet.tools.measurement.rows import BenchRow, finish
from tpdet.tools.worlds.lists import parse_sizes


def drafts_command(options: argparse.Namespace) -> int:
    """A world a size; each row stands beside the same requests without drafts."""
    with engine_of(options) as config:
        rows, largest = _measure(options, config)
    console = Console()
    for row in rows:
        for line in drafter_lines(row):
            console.print(line, highlight=False, soft_wrap=True)
    finish("drafts", largest.machine, rows, options.output, as_json=options.json)
    return 0


def _measure(
    options: argparse.Namespace, config: EngineConfig
) -> tuple[list[BenchRow], BenchResult]:
    """The rows of all sizes, and the result of the largest."""
    if not config.drafters:
        raise UsageError("bench drafts measures drafters, and there are none: leave drafts auto")
    of_texts, name = options.cases != "synthetic", options.model
    if of_texts and name is not None and is_shape(name):
        raise UsageError(f"model {name!r} is a shape without a tokenizer: add --cases synthetic")
    spec = DraftsSpec(
        settings=config.model_dump(exclude_unset=True),
        batches=parse_sizes(options.batch) if options.cases != "text" else (),
        acceptance=parse_shares(options.acceptance),
        context=options.context,
        tokens=options.generate,
        texts=of_texts,
        repeats=options.repeats,
        seed=options.seed,
    )
    return run_worlds(parse_sizes(options.tp), spec, config)


def drafter_lines(row: BenchRow) -> Iterator[str]:
    """Say which share of each drafter's drafts was right, and the time of a draft model's step.

    What is measured without drafts before and after them may differ by more than a hundredth.
    """
    if row.metrics is None:
        return
    place = f"TP {row.tp}, batch {row.batch}, {row.case}:"
    for name, counts in row.metrics["drafters"].items():
        drafted, right = counts["draft_tokens"], counts["accepted_tokens"]
        if drafted:
            share = f"{right / drafted:.0%}"
            yield f"{place} {right} of {drafted} drafts of {name} were right ({share})"
    if seconds := row.metrics.get("draft_step_ms"):
        yield f"{place} a step of {DRAFT_MODEL} takes {seconds:.2f} ms"
    after = row.metrics["without_drafts_after"]
    if abs(after - 1.0) > 0.01:
        yield f"{place} without drafts it was {after:.2f} times as fast afterwards as at first"


def parse_shares(text: str) -> tuple[float, ...]:
    """A list such as 0.5,0.8 as numbers from 0 to 1. Raises UsageError."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = (-1.0,)
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise UsageError(f"--acceptance {text!r} is no list of shares such as 0.5,0.8")
    return shares
