"""One rank of a verification world, under any launcher: `-m tpdet.tools.verify.rank FOLDER`.

The folder has the world's `spec.json`; the rank writes `report.json` and raw logits into it.
"""

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tpdet.audit.pooled import PooledAssembler, numbers_of
from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.model_config.fit import place_experts
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import open_world, ranks_per_gpu, resolve_device
from tpdet.comm.exchange.node import NodeExchange
from tpdet.comm.world.group_world import GroupWorld
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import NotFoundError, TpdetError, UsageError
from tpdet.kernels.order import PAGE_TOKENS, FoldPlan
from tpdet.kernels.partial_sums import PartialSums
from tpdet.launch.ranks.environment import read_environment
from tpdet.requests.request import PooledOutput, Request, RequestFailed
from tpdet.runner import Runner
from tpdet.scheduler.speculator import Speculator
from tpdet.speculative.draft_model.model import DraftModel
from tpdet.speculative.draft_model.start import start_draft_model
from tpdet.speculative.fixed import FixedSpeculator
from tpdet.text.outputs import RequestAssembler, logprob_bits
from tpdet.tools.verify.cases import (
    NEIGHBOUR_TOKENS,
    REPEATING,
    Circumstance,
    circumstances,
    drafted_without_graphs,
    in_other_processes,
    kv_pages,
    neighbours,
    probes,
    repeating_probes,
)
from tpdet.tools.verify.control import switch_in_stock_arithmetic
from tpdet.tools.verify.drafted import (
    KINDS,
    MODELS,
    OF_ENGINE,
    NanBehindWrongDrafts,
    Tokens,
    counted,
    drafter,
    speculator_of_engine,
    why_no_room,
    with_draft_model,
    with_drafts,
)
from tpdet.tools.verify.logits_log import LogitsLog
from tpdet.tools.verify.progress import CircumstancesDone
from tpdet.tools.verify.relations import (
    CACHE,
    EAGER,
    FRESH,
    GATHER,
    PACKED,
    PLACED,
    order_of_processes,
)
from tpdet.tools.verify.spec import Seen, Trace, VerifySpec, WorldReport, mode_settings
from tpdet.tools.worlds.machine import count_gpus, machine
from tpdet.tools.worlds.pretended_nodes import pretend_nodes
from tpdet.tools.worlds.worlds import run_rank

_Assembler = RequestAssembler | PooledAssembler


def main(arguments: list[str]) -> int:
    """Run the part of the relations that the spec names; rank 0 writes the report."""
    folder = Path(arguments[0])
    spec = _spec(folder)
    launcher, way = read_environment().launcher, spec.way
    pretend_nodes(way.nodes)
    world = open_world(spec.device, spec.step_timeout, share_gpus=True, transport=way.transport)
    node_folds = count_node_folds()
    if spec.control:
        switch_in_stock_arithmetic()
    # Ranks that share a GPU exchange through host memory, which no graph can contain.
    graphs = resolve_device(spec.device) == "cuda" and ranks_per_gpu() == 1
    traces, fingerprints, vocab_size = [], {}, 0
    left_out: list[str] = []
    loads = _loads(spec, graphs, world.size)
    count = len(spec.dtypes) * sum(len(load.circumstances) for load in loads)
    output = _Output(folder, CircumstancesDone(folder, count), left_out)
    for dtype in spec.dtypes:
        for load in loads:
            config = _config(spec, dtype, load, graphs)
            run, fingerprint, vocab_size = _run_load(spec, load, config, world, output)
            traces += run
            fingerprints[f"{dtype} {load.mode}"] = fingerprint
            gc.collect()  # the next model gets the memory of this one
    where = machine(spec.device, world.size)
    if where.gpus:
        where = msgspec.structs.replace(where, gpus=count_gpus(world))
    if world.rank == 0:
        report = WorldReport(
            tp=world.size,
            way=way,
            seen=Seen(
                launcher=launcher,
                nodes=len(dict.fromkeys(world.node_names)),
                by_mpi=world.by_mpi if isinstance(world, GroupWorld) else "",
                node_folds=node_folds(),
            ),
            vocab_size=vocab_size,
            fingerprints=fingerprints,
            traces=tuple(traces),
            machine=where,
            left_out=tuple(dict.fromkeys(left_out)),
        )
        (folder / "report.json").write_bytes(msgspec.json.encode(report))
    world.barrier()
    world.close()
    return 0


def _spec(folder: Path) -> VerifySpec:
    """The spec in `folder`. Raises NotFoundError on a host that does not see the folder."""
    try:
        data = (folder / "spec.json").read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{error.filename} is not on {os.uname().nodename}: ranks on other hosts have to see "
            "verify's temporary folder, set TMPDIR to one that all share"
        ) from error
    return msgspec.json.decode(data, type=VerifySpec)


@dataclass(frozen=True)
class _Load:
    """The circumstances of one loaded model, and the settings that it alone is loaded with."""

    mode: str
    circumstances: list[Circumstance]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Output:
    """The folder for raw logits, the count of circumstances, and what there was no room for."""

    folder: Path
    done: CircumstancesDone
    left_out: list[str]


def _loads(spec: VerifySpec, graphs: bool, ranks: int) -> list[_Load]:
    """The loads of this world, in order. The eager one is left out where there are no graphs.

    Ranks that share a GPU have no graphs and no peer memory.
    """
    order = order_of_processes(spec.modes)
    if spec.part == "steps":
        whole = circumstances(spec)
        others = [one for one in whole if one.drafts not in MODELS]
        return [_Load(mode, whole if mode == order else others) for mode in spec.modes]
    if spec.part == "cache":
        return [_Load(order, [in_other_processes(CACHE)])]
    loads = []
    if "fresh" in spec.relations:
        loads.append(_Load(order, [in_other_processes(FRESH)]))
    if "eager" in spec.relations and graphs:
        eager = [in_other_processes(EAGER)]
        eager += [drafted_without_graphs()] if "drafts" in spec.relations else []
        loads.append(_Load(order, eager, {"enforce_eager": True}))
    by_peers = graphs and ranks > 1 and spec.way.transport in ("auto", "peer")
    if "gather" in spec.relations and by_peers:
        loads.append(_Load(order, [in_other_processes(GATHER)], {"transport": "gather"}))
    other = _other_placement(spec, ranks) if "experts" in spec.relations else None
    if other is not None:
        loads.append(_Load(order, [in_other_processes(PLACED[other])], {"experts": other}))
    if "packed" in spec.relations:
        loads.append(_Load(order, [in_other_processes(PACKED)], {"weights": "packed"}))
    return loads


def _other_placement(spec: VerifySpec, ranks: int) -> str | None:
    """Where a model's experts do not lie unless asked; None where they can lie in one way only."""
    model = load_model_config(resolve_model(spec.model), spec.dtypes[0])
    usual = place_experts(model, ranks, "auto")
    other = "lanes" if usual == "columns" else "columns"
    try:
        placed = place_experts(model, ranks, other)
    except UsageError:
        return None
    return None if placed == usual else placed


def _config(spec: VerifySpec, dtype: str, load: _Load, graphs: bool) -> EngineConfig:
    longest = max(*spec.prompt_lengths, NEIGHBOUR_TOKENS) + spec.tokens
    settings = {
        "model": spec.model,
        "dtype": dtype,
        "device": spec.device,
        "load_format": spec.load_format,
        "step_timeout": spec.step_timeout,
        "kv_pages": kv_pages(spec),
        "max_model_len": -(-longest // PAGE_TOKENS) * PAGE_TOKENS,
        "max_num_seqs": max(*spec.batches, len(spec.prompt_lengths)),
        "enforce_eager": not graphs or spec.control,  # the control's experts wait
        "enable_prefix_caching": False,  # every compared position is computed
        # The control's stock all-reduce replaces the gather.
        "transport": "gather" if spec.control else spec.way.transport,
        "leaves": spec.leaves,
        "drafts": "off",  # those of a circumstance are its own
        "task": spec.task,
        "kv_cache_dtype": spec.kv_cache_dtype,
    }
    return EngineConfig.from_values(**settings | mode_settings(load.mode) | load.settings)


def _run_load(
    spec: VerifySpec, load: _Load, config: EngineConfig, world: World, output: _Output
) -> tuple[list[Trace], str, int]:
    """Load the model, run every circumstance and let go of it: traces, fingerprint, vocabulary."""
    runner = Runner.start(config, world)
    traces = _LoadedModel(spec, load, config, runner, world, output).run_all()
    runner.close()
    world.barrier()  # peers may read this rank's part of the vocabulary until they have closed, too
    return traces, runner.fingerprint(approximate=False), _width(runner.model_config)


def _width(model: ModelConfig) -> int:
    """Values of a row that is compared: logits, labels, or the row behind the last norm."""
    widths = {"tokens": model.vocab_size, "labels": model.labels, "none": model.hidden_size}
    return widths[model.head]


@dataclass(frozen=True)
class _LoadedModel:
    """A loaded model with its circumstances."""

    spec: VerifySpec
    load: _Load
    config: EngineConfig
    runner: Runner
    world: World
    output: _Output

    def run_all(self) -> list[Trace]:
        """Run every circumstance; the traces on rank 0."""
        traces: list[Trace] = []
        spec, world = self.spec, self.world
        vocabulary = self.runner.model_config.vocab_size
        base = {
            "": probes(vocabulary, spec.prompt_lengths, spec.tokens, spec.seed),
            REPEATING: repeating_probes(vocabulary, spec.tokens, spec.seed),
        }
        for circumstance in self.load.circumstances:
            requests = base[circumstance.texts]
            answers = next((it.tokens for it in traces if it.texts == circumstance.texts), {})
            if circumstance.prefill:
                data = world.broadcast_bytes(msgspec.json.encode(answers))
                tokens = msgspec.json.decode(data, type=dict[str, tuple[int, ...]])
                requests = [_as_prompt(probe, tokens[probe.request_id]) for probe in requests]
            if not circumstance.scored:
                requests = [_unscored(probe) for probe in requests]
            self.runner.reset_pages(self.runner.num_pages)
            config, model = self._engine_config(circumstance), None
            if circumstance.drafts in MODELS:
                if (why := why_no_room(config, world)) is not None:
                    self.output.left_out.append(f"TP {world.size}, {circumstance.name}: {why}")
                    continue
                model = start_draft_model(config, world, loaded=True)
            if world.rank > 0:
                every = circumstance.preempt_every
                Engine(config, world, None, every, self.runner).worker_loop()
            else:
                traces.append(self._run_one(circumstance, config, requests, answers, model))
                self.output.done.one_more()
            if model is not None:
                model.close()
        return traces

    def _engine_config(self, circumstance: Circumstance) -> EngineConfig:
        """The configuration of an engine in one circumstance, and of its draft model."""
        config = self.config
        changes: dict[str, object] = {"max_num_batched_tokens": circumstance.budget}
        if circumstance.drafts or circumstance.cached:
            changes["enable_prefix_caching"] = True  # probes publish pages, and read none
        if circumstance.drafts in OF_ENGINE:
            changes["drafts"] = "auto"
        if circumstance.drafts in MODELS:
            config = with_draft_model(circumstance.drafts, self.spec, config)
        return config.model_copy(update=changes)

    def _run_one(
        self,
        circumstance: Circumstance,
        config: EngineConfig,
        requests: list[Request],
        known: Tokens,
        model: DraftModel | None,
    ) -> Trace:
        """Run the probes on rank 0; known: their answers, for drafts; model: what drafts."""
        spec, mode, kind = self.spec, self.load.mode, circumstance.drafts
        name = f"{config.dtype}.{mode}.{circumstance.name}.logits".replace(" ", "-")
        values = self.output.folder / name
        log, vocabulary = LogitsLog(values), self.runner.model_config.vocab_size
        tokens = {
            probe.request_id: probe.prompt_token_ids + known.get(probe.request_id, ())
            for probe in requests
        }
        faults = NanBehindWrongDrafts(log.names, tokens) if circumstance.spoiled else None
        speculator: Speculator | None = None
        if kind in OF_ENGINE:
            speculator = speculator_of_engine(config, self.runner, model)
        elif kind:
            speculator = FixedSpeculator(drafter(kind, known, vocabulary, spec.seed))
        of = config, self.world, log.tap, circumstance.preempt_every, self.runner
        engine = Engine(*of, faults=faults, speculator=speculator)
        others = max(0, circumstance.batch - len(requests))
        crowd = neighbours(vocabulary, others, spec.tokens, spec.seed + circumstance.batch)
        if engine.pooler is not None:
            requests, crowd = (
                [engine.pooler.of(_unscored(request)) for request in some]
                for some in (requests, crowd)
            )
        groups = [[r] for r in requests] if circumstance.batch == 1 else [_mixed(requests, crowd)]
        if circumstance.cached:
            groups = [group for request in requests for group in ([_first(request)], [request])]
        assemblers = _run_groups(engine, groups, log, kind in KINDS)
        statistics = engine.statistics()
        engine.stop_workers()
        log.close(tokens)
        if circumstance.cached and not statistics.totals.prefix_hit_tokens:
            self.output.left_out.append(f"{name}: no prompt is longer than a page")
        answers = {name: _answer_of(assembler) for name, assembler in assemblers.items()}
        drafted = counted(kind, statistics.drafters, spec.draft_model is None)
        return Trace(
            dtype=config.dtype,
            mode=mode,
            circumstance=circumstance.name,
            tokens={name: token_ids for name, (token_ids, _) in answers.items()},
            logprob_bits={name: bits for name, (_, bits) in answers.items()},
            logits=log.digests,
            values=f"{values.parent.name}/{values.name}",
            steps=statistics.steps,
            texts=circumstance.texts,
            scored=circumstance.scored,
            drafted=drafted if kind in OF_ENGINE else None,
        )


def _run_groups(
    engine: Engine, groups: list[list[Request]], log: LogitsLog, drafted: bool
) -> dict[str, _Assembler]:
    """Run each group of requests when the one before is done; the probes' answers, by name."""
    assemblers: dict[str, _Assembler] = {}
    admission = 0
    for group in groups:
        for request in group:
            if request.request_id.startswith("probe"):
                log.names[admission] = request.request_id
                assemblers[request.request_id] = (
                    RequestAssembler(request, None)
                    if request.pooling is None
                    else PooledAssembler(request)
                )
            engine.submit(with_drafts(request) if drafted else request)
            admission += 1
        while engine.has_work:
            for output in engine.step():
                assembler = assemblers.get(output.request_id)
                if isinstance(assembler, PooledAssembler):
                    assert isinstance(output, PooledOutput | RequestFailed)
                    assembler.push(output)
                elif assembler is not None and not isinstance(output, PooledOutput):
                    assembler.push(output)
    return assemblers


def _answer_of(assembler: _Assembler) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """A probe's tokens, and fp32 bits. Raises TpdetError for a pooled prompt without answer."""
    if isinstance(assembler, PooledAssembler):
        if assembler.output is None:
            raise TpdetError(f"{assembler.request.request_id}: {assembler.failure}")
        values = numbers_of(assembler.output.values)
        return (), tuple(map(logprob_bits, values))
    answer = assembler.answer().choices[0]
    return answer.token_ids, tuple(logprob_bits(token.logprob) for token in answer.logprobs)


def _first(probe: Request) -> Request:
    """One of the same prompt, which leaves its pages to the probe and is not compared."""
    return msgspec.structs.replace(probe, request_id=f"before-{probe.request_id}")


def _mixed(requests: list[Request], crowd: list[Request]) -> list[Request]:
    """Probes spread among their neighbours, so that their place in the batch varies."""
    mixed = list(crowd)
    for index, request in enumerate(requests):
        mixed.insert(min(len(mixed), 3 * index + 1), request)
    return mixed


def _as_prompt(probe: Request, tokens: tuple[int, ...]) -> Request:
    """A probe's prompt and answer as one prompt, scored at every position."""
    params = msgspec.structs.replace(probe.params, max_tokens=0, min_tokens=0)
    return msgspec.structs.replace(
        probe, prompt_token_ids=probe.prompt_token_ids + tokens[:-1], params=params
    )


def _unscored(probe: Request) -> Request:
    """A probe whose prompt's tokens have no log-probabilities."""
    params = msgspec.structs.replace(
        probe.params, prompt_logprobs=None, prompt_logprobs_last_n=None
    )
    return msgspec.structs.replace(probe, params=params)


def count_node_folds() -> Callable[[], int]:
    """Start to count; returns a function that gives this process's number of two-level folds."""
    fold, seen = NodeExchange.everyones, 0

    def counted(
        exchange: NodeExchange, sums: PartialSums, plan: FoldPlan | None = None
    ) -> PartialSums:
        nonlocal seen
        seen += 1
        return fold(exchange, sums, plan)

    NodeExchange.everyones = counted  # type: ignore[assignment, method-assign]
    return lambda: seen


if __name__ == "__main__":
    sys.exit(run_rank(main))
