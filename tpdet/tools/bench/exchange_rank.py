"""One rank that times the exchange: `torchrun ... -m tpdet.tools.bench.exchange_rank SPEC RESULT`.

An exchange folds all ranks' fp32 sums, adds the residual stream and norms it. CUDA graphs time it
in turn with the gathered form and with NCCL's bf16 all-reduce, with and without the norm kernel
after it. Our bytes are first compared with those of the gathered form.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from tpdet.comm.device import open_world
from tpdet.comm.exchange.fold import Exchange, GatherExchange
from tpdet.comm.exchange.open import open_exchange
from tpdet.comm.world.distributed import DistributedWorld
from tpdet.errors import TpdetError
from tpdet.kernels import ops
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.order import DEFAULT_LEAVES, FoldPlan, fold_plan
from tpdet.kernels.partial_sums import PartialSums
from tpdet.tools.bench.kernels.gpu import random_values
from tpdet.tools.bench.kernels.timing import capture
from tpdet.tools.bench.report.floor import exchange_seconds, here
from tpdet.tools.bench.report.record import BenchRow
from tpdet.tools.bench.spec import BenchResult, ExchangeSpec, output_rows
from tpdet.tools.worlds.machine import machine
from tpdet.tools.worlds.worlds import run_rank

_EPS = 1e-6
_CHAIN_BYTES = 64 << 20  # of outputs in a graph, roughly
_MOST_CALLS = 50

Run = Callable[[torch.Tensor], object]


def main(arguments: list[str]) -> int:
    """Time every size; rank 0 writes the rows."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=ExchangeSpec)
    world = open_world("cuda", spec.timeout)
    if not isinstance(world, DistributedWorld):
        raise TpdetError("an exchange needs 2 ranks or more")
    plan = fold_plan(spec.fold_order, DEFAULT_LEAVES, world.size)
    rows = [output_rows(kilobytes, spec.hidden) for kilobytes in spec.kilobytes]
    device = torch.device("cuda", torch.cuda.current_device())
    exchange = open_exchange("auto", plan, world, max(rows), spec.hidden, torch.bfloat16, device)
    found: list[BenchRow] = []
    for kilobytes, count in zip(spec.kilobytes, rows, strict=True):
        found += Case(world, plan, exchange, spec, count).rows(kilobytes)
        torch.cuda.empty_cache()
    carrier = exchange.carrier
    carrier.report()
    torch.cuda.synchronize()
    carrier.check()
    if world.rank == 0:
        notes = (
            () if exchange.carrier.memory else ("no peer memory here: ours is the gathered form",)
        )
        result = BenchResult(rows=tuple(found), machine=machine("cuda", world.size), notes=notes)
        Path(arguments[1]).write_bytes(msgspec.json.encode(result))
    world.barrier()
    world.close()
    return 0


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
        return [
            BenchRow(
                case="allreduce",
                dtype="bfloat16",
                mode=self._spec.fold_order,
                tp=self._world.size,
                batch=self._count,
                context=kilobytes,
                value=ours,
                unit="us",
                floor=floor,
                peer=name,
                peer_value=value,
                ratio=ours / value,
            )
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
        ours, wanted = self._ours(self._residual)[1], self._gathered(self._residual)[1]
        if not torch.equal(ours.view(torch.int16), wanted.view(torch.int16)):
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
                self._exchange.carrier.all_gather(
                    self._norm.weight[:8]
                )  # the GPUs leave it together
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) / calls * 1e3)
        medians = torch.tensor([sorted(times)[len(times) // 2] for times in taken], device="cuda")
        slowest: list[float] = self._world.all_gather(medians).amax(0).tolist()
        return slowest


if __name__ == "__main__":
    sys.exit(run_rank(main))
