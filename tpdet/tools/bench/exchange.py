"""`tpdet bench allreduce`: the exchange between ranks beside NCCL's all-reduce.

An exchange folds all ranks' fp32 sums, adds the residual stream and norms it. CUDA graphs time it
in turn with the gathered form and with NCCL's bf16 all-reduce, with and without the norm kernel
after it. Our bytes are first compared with those of the gathered form.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tpdet.comm.device import open_world
from tpdet.comm.exchange.fold import Exchange, GatherExchange
from tpdet.comm.exchange.open import open_exchange
from tpdet.comm.world.distributed import DistributedWorld
from tpdet.errors import TpdetError, UsageError
from tpdet.kernels import ops
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.order import DEFAULT_LEAVES, FoldPlan, fold_plan
from tpdet.kernels.partial_sums import PartialSums
from tpdet.tools.bench.kernels.gpu import gpu_only, random_values
from tpdet.tools.bench.run import run_worlds
from tpdet.tools.bench.spec import BenchResult, ExchangeSpec, output_rows, result_of
from tpdet.tools.measurement.floor import exchange_seconds, here
from tpdet.tools.measurement.graph_times import capture
from tpdet.tools.measurement.rows import BenchRow, finish, kernel_row
from tpdet.tools.worlds.lists import parse_sizes

_EPS = 1e-6
_CHAIN_BYTES = 64 << 20  # of outputs in a graph, roughly
_MOST_CALLS = 50

Run = Callable[[torch.Tensor], object]


def allreduce_command(options: argparse.Namespace) -> int:
    """The exchange between ranks beside NCCL's all-reduce, a world a size."""
    gpu_only("allreduce")
    tps = parse_sizes(options.tp)
    if min(tps) < 2:
        raise UsageError("--tp: an exchange needs 2 ranks or more")
    spec = ExchangeSpec(
        kilobytes=parse_sizes(options.kilobytes),
        hidden=options.hidden,
        fold_order=options.fold_order,
        repeats=options.repeats,
    )
    rates = here()
    if rates is not None:
        for tp in tps:
            plan = fold_plan(spec.fold_order, DEFAULT_LEAVES, tp)
            values = [output_rows(size, spec.hidden) * spec.hidden for size in spec.kilobytes]
            floors = [exchange_seconds(rates, plan, count) * 1e6 for count in values]
            figures = " / ".join(f"{floor:.1f}" for floor in floors)
            print(f"floor, TP {tp}, {options.kilobytes} KB: {figures} us", flush=True)
    rows, largest = run_worlds(tps, spec)
    return finish("allreduce", largest.machine, rows, options.output, as_json=options.json)


def measure(spec: ExchangeSpec) -> BenchResult | None:
    """One rank: time every size; the result on rank 0."""
    world = open_world("cuda", spec.timeout)
    if not isinstance(world, DistributedWorld):
        raise TpdetError("an exchange needs 2 ranks or more")
    plan = fold_plan(spec.fold_order, DEFAULT_LEAVES, world.size)
    rows = [output_rows(kilobytes, spec.hidden) for kilobytes in spec.kilobytes]
    device = torch.device("cuda", torch.cuda.current_device())
    exchange = open_exchange("auto", plan, world, max(rows), spec.hidden, torch.bfloat16, device)
    timed: list[BenchRow] = []
    for kilobytes, count in zip(spec.kilobytes, rows, strict=True):
        timed += Case(world, plan, exchange, spec, count).rows(kilobytes)
        torch.cuda.empty_cache()
    carrier = exchange.carrier
    carrier.report()
    torch.cuda.synchronize()
    carrier.check()
    notes = () if carrier.memory else ("no peer memory here: ours is the gathered form",)
    world.barrier()
    world.close()
    return result_of(timed, "cuda", world.size, notes) if world.rank == 0 else None


class Case:
    """One size: its operands on this rank."""

    def __init__(
        self,
        world: DistributedWorld,
        plan: FoldPlan,
        exchange: Exchange,
        spec: ExchangeSpec,
        count: int,
    ) -> None:
        self._world, self._plan, self._exchange, self._spec = world, plan, exchange, spec
        self._gather = exchange.carrier.all_gather
        self._count = count
        roots = len(plan.roots[world.rank])
        values = random_values(roots, count, spec.hidden, seed=world.rank, dtype=torch.float32)
        self._sums = PartialSums(values, tuple(range(roots)))
        self._whole = PartialSums(values[:1], (0,))
        self._residual = random_values(count, spec.hidden, seed=100, dtype=torch.float32)
        self._norm = Norm(random_values(spec.hidden, seed=101), _EPS)
        self._reduced = torch.zeros(count, spec.hidden, dtype=torch.bfloat16, device="cuda")

    def rows(self, kilobytes: int) -> list[BenchRow]:
        """Ours beside NCCL's, and beside the gathered form."""
        self.check_bits()
        calls = max(2, min(_MOST_CALLS, _CHAIN_BYTES // (kilobytes * 1024)))
        ours, gathered, library, alone = self._times(calls)
        rates, values = here(), self._count * self._spec.hidden
        floor = None if rates is None else exchange_seconds(rates, self._plan, values) * 1e6
        peers = {"NCCL + norm": library, "NCCL": alone, "gather": gathered}
        case: dict[str, Any] = {
            "mode": self._spec.fold_order,
            "tp": self._world.size,
            "batch": self._count,
            "context": kilobytes,
        }
        return [
            kernel_row("allreduce", ours, floor, (name, value), **case)
            for name, value in peers.items()
        ]

    def _gathered(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exchange = GatherExchange(self._plan, self._world)
        return exchange.fold_and_norm(self._sums, Finish(residual, self._norm))

    def _ours(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._exchange.fold_and_norm(self._sums, Finish(residual, self._norm))

    def _library(self, residual: torch.Tensor) -> object:
        dist.all_reduce(self._reduced, group=self._world.process_group)
        return ops.fold_and_norm(self._whole, Finish(residual, self._norm))

    def _alone(self, residual: torch.Tensor) -> None:
        dist.all_reduce(self._reduced, group=self._world.process_group)

    def check_bits(self) -> None:
        """Raises TpdetError when the exchange and the gathered form differ in y."""
        ours, gathered = self._ours(self._residual)[1], self._gathered(self._residual)[1]
        if not torch.equal(ours.view(torch.int16), gathered.view(torch.int16)):
            raise TpdetError(f"{self._count} rows: the exchange gives other bits than the gather")

    def _times(self, calls: int) -> list[float]:
        """Median microseconds a call of the slowest rank: ours, gathered, NCCL with norm, alone."""
        graphs = []
        for run in (self._ours, self._gathered, self._library, self._alone):
            graphs.append(capture(run, [self._residual] * calls))
            torch.cuda.synchronize()
            self._world.barrier()
        taken: list[list[float]] = [[] for _ in graphs]
        for _ in range(self._spec.repeats):
            for graph, times in zip(graphs, taken, strict=True):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._world.barrier()
                self._gather(self._norm.weight[:8])  # the GPUs leave it together
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) / calls * 1e3)
        medians = torch.tensor([sorted(times)[len(times) // 2] for times in taken], device="cuda")
        return self._world.all_gather(medians).amax(0).tolist()
