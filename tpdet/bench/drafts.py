"""`tpdet bench drafts`: steps and tokens/s with drafters, beside those without."""

import argparse
import os

from tpdet.bench.report.record import finish
from tpdet.bench.run import run_worlds
from tpdet.bench.spec import DraftsSpec
from tpdet.client.engine_settings import engine_config
from tpdet.errors import UsageError
from tpdet.verify.run import parse_sizes


def drafts_command(options: argparse.Namespace) -> int:
    """A world a size; each row stands beside the same requests without drafts."""
    config = engine_config(options, os.environ)
    if not config.drafters:
        raise UsageError("bench drafts measures drafters, and there are none: leave drafts auto")
    spec = DraftsSpec(
        settings=config.model_dump(exclude_unset=True),
        batches=parse_sizes(options.batch) if options.cases != "text" else (),
        acceptance=parse_shares(options.acceptance),
        context=options.context,
        tokens=options.generate,
        texts=options.cases != "synthetic",
        repeats=options.repeats,
        seed=options.seed,
    )
    rows, largest = run_worlds(parse_sizes(options.tp), "tpdet.bench.drafts_rank", spec, config)
    finish("drafts", largest.machine, rows, options.output, as_json=options.json)
    return 0


def parse_shares(text: str) -> tuple[float, ...]:
    """A list such as 0.5,0.8 as numbers from 0 to 1. Raises UsageError."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = (-1.0,)
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise UsageError(f"--acceptance {text!r} is no list of shares such as 0.5,0.8")
    return shares
