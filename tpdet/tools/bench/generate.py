"""`tpdet bench generate`: `LLM.generate` as its callers have it, beside another engine's figures.

Every setting that is not given has the default of `LLM`. Prompts are ids, and no text is made.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tpdet.engine import Engine
from tpdet.errors import NotFoundError, UsageError
from tpdet.llm.llm import LLM
from tpdet.requests.request import SamplingParams
from tpdet.tools.bench.engine import engine_of, engine_row
from tpdet.tools.bench.generate_load import GenerateFigure, Sizes, time_generate
from tpdet.tools.bench.run import run_worlds
from tpdet.tools.bench.spec import BenchResult, GenerateSpec, result_of
from tpdet.tools.measurement.rows import BenchRow, finish
from tpdet.tools.worlds.lists import parse_range, parse_sizes


class PeerFigures(msgspec.Struct, frozen=True):
    """What `scripts/vllm_generate.py` writes: the engine's name and version, its settings."""

    peer: str
    tp: int
    rows: tuple[GenerateFigure, ...]
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
        contexts=() if options.contexts is None else parse_sizes(options.contexts),
        repeats=options.repeats,
        seed=options.seed,
    )
    tps = parse_sizes(options.tp)
    with engine_of(options) as config:
        settings = config.model_dump(exclude_unset=True) | {"skip_tokenizer_init": True}
        spec = GenerateSpec(settings=settings, sizes=sizes)
        rows, largest = run_worlds(tps, spec, config)
    rows = [beside(row, peers) for row in rows]
    return finish("peer", largest.machine, rows, options.output, as_json=options.json)


def read_peer(path: Path) -> PeerFigures:
    """The figures of a file. Raises NotFoundError, and UsageError for what holds none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PeerFigures)
    except FileNotFoundError:
        remedy = "scripts/vllm_generate.py writes one"
        raise NotFoundError(f"--peer {path} does not exist: {remedy}") from None
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
                metrics = (row.metrics or {}) | {
                    "peer_least": other.least,
                    "peer_most": other.most,
                    "peer_settings": peer.settings,
                }
                return row.beside(peer.peer, other.value, metrics=metrics)
    return row


def measure(spec: GenerateSpec) -> BenchResult | None:
    """One rank: run every case on all ranks; the result on rank 0."""
    with LLM(**({"drafts": "off"} | spec.settings)) as llm:
        engine = llm.engine
        sizes = sizes_for(spec.sizes, engine.model_config.vocab_size, engine.max_model_len)

        def generate(prompts: list[list[int]], tokens: int) -> float:
            params = SamplingParams(
                temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - begin

        rows = [figure_row(engine, figure) for figure in time_generate(generate, sizes)]
        device = engine.runner.device.type
        return result_of(rows, device, engine.world.size) if llm.rank == 0 else None


def figure_row(engine: Engine, figure: GenerateFigure) -> BenchRow:
    """A figure as a row; its least and most stand among the metrics."""
    fields = figure.plain()
    metrics = {name: fields.pop(name) for name in ("least", "most")}
    return engine_row(engine, metrics=metrics, **fields)


def sizes_for(sizes: Sizes, vocabulary: int, context: int) -> Sizes:
    """The sizes with ids that the model has. Raises UsageError for sequences over its context."""
    if sizes.longest > context:
        raise UsageError(
            f"sequences of {sizes.longest} tokens are over the context of {context}: raise "
            "--max-model-len, or lower --prefill-tokens, --contexts, --input or --generate"
        )
    return replace(sizes, vocabulary=min(sizes.vocabulary, vocabulary))
