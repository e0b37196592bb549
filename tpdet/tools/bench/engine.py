"""The engine that `latency` and `throughput` time, by the settings of `LLM`, and its rows."""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.model_config.known_shapes import directory_of
from tpdet.checkpoint.resolve import resolve_model
from tpdet.client.engine_settings import engine_config
from tpdet.comm.device import open_world, resolve_device
from tpdet.config import APPROXIMATE, EngineConfig
from tpdet.engine import Engine
from tpdet.kernels.cuda.hardware import Rates
from tpdet.tools.bench.spec import BenchResult, EngineSpec, result_of
from tpdet.tools.measurement.floor import CaseWork, here
from tpdet.tools.measurement.rows import BenchRow
from tpdet.tools.worlds.lists import parse_sizes

TimedSpec = TypeVar("TimedSpec", bound=EngineSpec)


@contextmanager
def engine_of(options: argparse.Namespace) -> Iterator[EngineConfig]:
    """The engine that flags, the environment and the file of --config ask for.

    With random weights its models may be shapes by name, whose config.json is there until the end.
    Raises as `engine_config` and `directory_of`.
    """
    config = engine_config(options, os.environ)
    with tempfile.TemporaryDirectory(prefix="tpdet-shapes-") as folder:
        models = {"model": config.model, "draft_model": config.draft_model}
        yield config.model_copy(
            update={
                field: directory_of(name, config.load_format, Path(folder))
                for field, name in models.items()
                if name is not None
            }
        )


def ready(
    options: argparse.Namespace, engine: EngineConfig
) -> tuple[tuple[int, ...], ModelConfig, Rates | None]:
    """Sizes, model and the GPU's rates; a model that cannot be loaded is refused here."""
    config = load_model_config(resolve_model(engine.model, engine.revision), engine.dtype)
    cuda = resolve_device(engine.device) == "cuda"
    return parse_sizes(options.tp), config, here() if cuda else None


def measure_engine(
    spec: TimedSpec, time: Callable[[Engine, TimedSpec], tuple[list[BenchRow], list[str]]]
) -> BenchResult | None:
    """One rank: start the engine, and `time` it on rank 0, which has the result."""
    config = EngineConfig.from_values(**({"drafts": "off"} | spec.settings))
    world = open_world(
        config.device, config.step_timeout, share_gpus=True, transport=config.transport
    )
    engine = Engine(config, world, streams=False)  # as `LLM` has it
    result = None
    if world.rank > 0:
        engine.worker_loop()
    else:
        rows, notes = time(engine, spec)
        engine.stop_workers()
        result = result_of(rows, config.device, world.size, notes)
    world.barrier()
    engine.close()
    return result


def engine_row(engine: Engine, **fields: Any) -> BenchRow:
    """A row about this engine; a transport that was asked for is part of its mode.

    The mode is the fold order, the rule of its row layers, or APPROXIMATE; and who drafts.
    """
    config, transport = engine.config, engine.config.transport
    mode = str(config.fold_order if config.row_layers == "fold" else config.row_layers)
    if engine.approximate:
        mode = APPROXIMATE
    if config.kv_cache_dtype != "auto":
        mode += f", KV cache {config.kv_cache_dtype}"
    if config.drafters:
        mode += f", drafts {config.drafts}"
    if config.draft_model is not None:
        mode += f" and {Path(config.draft_model).name}"
    return BenchRow(
        model=Path(engine.config.model).name,
        dtype=engine.model_config.dtype,
        mode=mode if transport == "auto" else f"{mode}, {transport}",
        tp=engine.world.size,
        budget=engine.scheduler.policy.max_num_batched_tokens,
        **fields,
    )


def row_beside_floor(
    engine: Engine, work: CaseWork, seconds: float, value: float, unit: str, **fields: Any
) -> BenchRow:
    """A row of `seconds` of all ranks' `work`, beside the least there can be on a known GPU.

    value: the seconds in `unit`, or a rate over them where the unit is one a second.
    """
    rates = here() if engine.runner.device.type == "cuda" else None
    floor = ratio = None
    if rates is not None:
        ratio = seconds / work.over(engine.world.size).seconds(rates)
        floor = value * ratio if unit.endswith("/s") else value / ratio
    return engine_row(engine, value=value, unit=unit, floor=floor, ratio=ratio, **fields)
