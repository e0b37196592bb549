"""`tpdet bench generate`: `LLM.generate` as its callers have it, beside another engine's figures.

Every setting that is not given has the default of `LLM`. Prompts are ids, and no text is made.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tpdet.errors import NotFoundError, UsageError
from tpdet.tools.bench.engine import engine_of
from tpdet.tools.bench.generate_load import Sizes
from tpdet.tools.bench.report.record import BenchRow, finish
from tpdet.tools.bench.run import parse_range, run_worlds
from tpdet.tools.bench.spec import GenerateSpec
from tpdet.tools.verify.run import parse_sizes


class PeerRow(msgspec.Struct, frozen=True):
    """A figure of another engine: what `GenerateFigure` has."""

    case: str
    batch: int
    context: int
    value: float
    unit: str


class PeerFigures(msgspec.Struct, frozen=True):
    """What `scripts/vllm_generate.py` writes. peer: the engine's name and version.

    settings: those that it was given.
    """

    peer: str
    tp: int
    rows: tuple[PeerRow, ...]
    settings: dict[str, Any] = {}


def generate_command(options: argparse.Namespace) -> int:
    """A world a size; its rows stand beside the figures of `--peer`, where there are any."""
    peers = [read_peer(path) for path in options.peer or ()]
    sizes = Sizes(
        batches=parse_sizes(options.batch),
        prefill_prompts=options.prefill_prompts,
        prefill_tokens=options.prefill_tokens,
        mixed_requests=options.requests,
        mixed_prompt=parse_range(options.input),
        mixed_tokens=options.generate,
        seed=options.seed,
    )
    tps = parse_sizes(options.tp)
    with engine_of(options) as config:
        settings = config.model_dump(exclude_unset=True) | {"skip_tokenizer_init": True}
        spec = GenerateSpec(settings=settings, sizes=sizes)
        rows, largest = run_worlds(tps, "tpdet.tools.bench.generate_rank", spec, config)
    rows = [beside(row, peers) for row in rows]
    finish("peer", largest.machine, rows, options.output, as_json=options.json)
    return 0


def read_peer(path: Path) -> PeerFigures:
    """The figures of a file. Raises NotFoundError, and UsageError for what holds none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PeerFigures)
    except FileNotFoundError:
        raise NotFoundError(f"--peer {path} does not exist") from None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"--peer {path} holds no figures ({error}): scripts/vllm_generate.py writes them"
        ) from None


def beside(row: BenchRow, peers: Sequence[PeerFigures]) -> BenchRow:
    """The row with the figure of the same case of a peer of the same size; as it is without."""
    for peer in peers:
        for other in peer.rows:
            same = (other.case, other.batch, other.context, other.unit)
            if peer.tp == row.tp and same == (row.case, row.batch, row.context, row.unit):
                rate = row.unit.endswith("/s")
                ratio = other.value / row.value if rate else row.value / other.value
                metrics = {"peer_settings": peer.settings}
                return msgspec.structs.replace(
                    row, peer=peer.peer, peer_value=other.value, ratio=ratio, metrics=metrics
                )
    return row
