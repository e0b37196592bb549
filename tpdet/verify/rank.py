"""One rank of a verification world: `torchrun ... -m tpdet.verify.rank SPEC.json FOLDER`."""

import hashlib
import sys
from pathlib import Path

import msgspec
import torch

from tpdet.comm.device import open_world, ranks_per_gpu
from tpdet.comm.world import World
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.outputs import RequestAssembler, logprob_bits
from tpdet.plan import Row
from tpdet.request import Request
from tpdet.runner import Runner
from tpdet.verify.cases import NEIGHBOUR_TOKENS, Circumstance, circumstances, neighbours, probes
from tpdet.verify.control import switch_in_stock_arithmetic
from tpdet.verify.machine import machine
from tpdet.verify.rank_files import position_header
from tpdet.verify.spec import Trace, VerifySpec, WorldReport

MAX_VALUE_BYTES = 256 << 20  # of raw logits kept a circumstance, to name the first difference
_MAX_PAGES = 256


class LogitsLog:
    """Hashes the probes' logits position by position and keeps the raw values on disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._kept = 0
        self.names: dict[int, str] = {}  # admission -> request id
        self.digests: dict[str, dict[int, str]] = {}

    def tap(self, row: Row, position: int, logits: torch.Tensor) -> None:
        """Log the logits [n, V] of a row at `position`, `position + 1`, ..., each position once."""
        name = self.names.get(row.admission)
        if name is None:
            return
        seen = self.digests.setdefault(name, {})
        for offset, values in enumerate(logits):
            body = values.contiguous().numpy().data
            digest = hashlib.sha256(body).hexdigest()
            # A recomputed position (after a preemption) must have the bits it had before.
            known = seen.setdefault(position + offset, digest)
            if known != digest:
                seen[position + offset] = f"recomputed: {known} then {digest}"
            if self._kept < MAX_VALUE_BYTES:
                self._file.write(position_header(name, position + offset))
                self._file.write(body)
                self._kept += body.nbytes

    def close(self) -> None:
        """Finish the file of raw values."""
        self._file.close()


def main(arguments: list[str]) -> int:
    """Run every dtype, fold order and circumstance of the spec; rank 0 writes the report."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=VerifySpec)
    folder = Path(arguments[1])
    world = open_world(spec.device, spec.step_timeout, share_gpus=True)
    if spec.control:
        switch_in_stock_arithmetic()
    traces, fingerprints, vocab_size = [], {}, 0
    for dtype in spec.dtypes:
        for order in spec.fold_orders:
            config = EngineConfig.from_values(
                model=spec.model, dtype=dtype, fold_order=order, device=spec.device,
                load_format=spec.load_format, step_timeout=spec.step_timeout,
                kv_pages=_MAX_PAGES, max_model_len=_context(spec), max_num_seqs=_seats(spec),
                enforce_eager=ranks_per_gpu() > 1,  # host memory is no part of a graph
            )  # fmt: skip
            runner = Runner(config, world)
            fingerprints[f"{dtype} {order}"] = runner.system_fingerprint
            vocab_size = runner.model_config.vocab_size
            traces += _run_all(spec, config, runner, world, folder)
            runner.close()
    if world.rank == 0:
        report = WorldReport(
            tp=world.size,
            vocab_size=vocab_size,
            fingerprints=fingerprints,
            traces=tuple(traces),
            machine=machine(spec.device, world.size),
        )
        (folder / f"tp{world.size}.json").write_bytes(msgspec.json.encode(report))
    world.barrier()
    world.close()
    return 0


def _context(spec: VerifySpec) -> int:
    """Positions that the longest probe or neighbour needs, in whole pages."""
    longest = max(*spec.prompt_lengths, NEIGHBOUR_TOKENS) + spec.tokens
    return -(-longest // PAGE_TOKENS) * PAGE_TOKENS


def _seats(spec: VerifySpec) -> int:
    """Sequences in flight together, at most."""
    return max(*spec.batches, len(spec.prompt_lengths))


def _run_all(
    spec: VerifySpec, config: EngineConfig, runner: Runner, world: World, folder: Path
) -> list[Trace]:
    """Every circumstance on one loaded model."""
    traces: list[Trace] = []
    base = probes(runner.model_config.vocab_size, spec.prompt_lengths, spec.tokens, spec.seed)
    for index, circumstance in enumerate(circumstances(spec.batches, spec.budgets)):
        if circumstance.prefill:
            data = msgspec.json.encode(traces[0].tokens if traces else {})
            tokens = msgspec.json.decode(
                world.broadcast_bytes(data), type=dict[str, tuple[int, ...]]
            )
            requests = [_as_prompt(probe, tokens[probe.request_id]) for probe in base]
        else:
            requests = base
        runner.reset_pages(_MAX_PAGES)
        name = f"tp{world.size}.{config.dtype}.{config.fold_order}.{index}.logits"
        trace = _run_one(spec, circumstance, requests, config, runner, world, folder / name)
        traces += [trace] if trace is not None else []
    return traces


def _run_one(
    spec: VerifySpec,
    circumstance: Circumstance,
    requests: list[Request],
    config: EngineConfig,
    runner: Runner,
    world: World,
    values: Path,
) -> Trace | None:
    """Run the probes in one circumstance; the trace on rank 0, None elsewhere."""
    config = config.model_copy(update={"max_num_batched_tokens": circumstance.budget})
    log = LogitsLog(values) if world.rank == 0 else None
    tap = log.tap if log is not None else None
    engine = Engine(config, world, tap, circumstance.preempt_every, runner)
    if log is None:
        engine.worker_loop()
        return None
    assemblers: dict[str, RequestAssembler] = {}
    crowd = neighbours(
        runner.model_config.vocab_size,
        max(0, circumstance.batch - len(requests)),
        spec.tokens,
        spec.seed + circumstance.batch,
    )
    groups = [[r] for r in requests] if circumstance.batch == 1 else [_mixed(requests, crowd)]
    admission = 0
    for group in groups:
        for request in group:
            if request.request_id.startswith("probe"):
                log.names[admission] = request.request_id
                assemblers[request.request_id] = RequestAssembler(request, None)
            engine.submit(request)
            admission += 1
        while engine.has_work:
            for output in engine.step():
                if output.request_id in assemblers:
                    assemblers[output.request_id].push(output)
    steps = engine.statistics().steps
    engine.stop_workers()
    log.close()
    answers = {name: assembler.answer().choices[0] for name, assembler in assemblers.items()}
    return Trace(
        dtype=config.dtype,
        fold_order=config.fold_order,
        circumstance=circumstance.name,
        tokens={name: answer.token_ids for name, answer in answers.items()},
        logprob_bits={
            name: tuple(logprob_bits(token.logprob) for token in answer.logprobs)
            for name, answer in answers.items()
        },
        logits=log.digests,
        values=values.name,
        steps=steps,
    )


def _mixed(requests: list[Request], crowd: list[Request]) -> list[Request]:
    """Probes spread among their neighbours, so that none has its own slot."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
