"""Two levels on GPUs of one host that pretend to be two nodes: bits against one level.

    export GLOO_SOCKET_IFNAME=lo
    MEET="--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29600 --nproc-per-node 2"
    CUDA_VISIBLE_DEVICES=0,1 NCCL_HOSTID=a torchrun $MEET -m tests.gpu.exchange.nodes &
    CUDA_VISIBLE_DEVICES=2,3 NCCL_HOSTID=b torchrun $MEET -m tests.gpu.exchange.nodes

Inside a pair is peer memory (few rows) and NCCL over NVLink; NCCL_HOSTID makes NCCL go from pair to
pair as between hosts. Every rank checks, rank 0 reports; exits 1 if anything failed. With
`--device cpu` it runs over gloo.
"""

import sys

import torch

from tpdet.comm.device import current_device, open_world
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.comm.exchange.open import open_node_exchange
from tpdet.comm.world.nodes import open_nodes
from tpdet.kernels import order
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import PartialSums, relative_roots

HIDDEN, EPS = 4096, 1e-6
ROWS = (1, 4, 16, 64, 255, 256, 1000, 2048)
"""16 KB to 32 MB of fp32 a partial."""


class Case:
    """Both exchanges, and sums of which every rank has its own."""

    def __init__(self, kind, name="pairs", leaves=8):
        self.world = open_world(kind, 60.0)
        self.device = current_device(kind)
        self.nodes = open_nodes(self.world)
        if self.nodes is None:
            raise SystemExit("one node, or one rank a node: start it as the module's text says")
        self.leaves = leaves
        self.rows = ROWS if kind == "cuda" else (1, 16, 256)
        self.take(name)

    def take(self, name):
        """Exchanges of this fold order."""
        self.plan = order.fold_plan(name, self.leaves, self.world.size)
        self.one = GatherExchange(self.plan, self.world)
        self.two = open_node_exchange(
            "auto", self.plan, self.nodes, max(self.rows), HIDDEN, self.device
        )

    def inputs(self, rows):
        share = self.leaves // self.world.size
        generator = torch.Generator().manual_seed(rows * 64 + self.world.rank)
        values = torch.randn(share, rows, HIDDEN, generator=generator).to(self.device)
        roots = relative_roots(self.plan.roots[self.world.rank])
        stream = torch.ones(rows, HIDDEN, device=self.device)
        return PartialSums(values, roots), Finish(stream, Norm(stream[0].bfloat16(), EPS))

    def check(self, rows):
        """Whether (h, y) of both have the same bits."""
        sent = self.inputs(rows)
        pairs = zip(self.one.fold_and_norm(*sent), self.two.fold_and_norm(*sent), strict=True)
        return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def wait(self):
        self.synchronize()
        self.world.barrier()


def main():
    kind = "cpu" if sys.argv[1:] == ["--device", "cpu"] else "cuda"
    case, failed = Case(kind), False
    for name in order.FOLD_ORDERS:
        case.take(name)
        for rows in case.rows:
            said = case.world.gather_bytes(b"ok" if case.check(rows) else b"FAIL")
            failed = failed or b"FAIL" in said
            if case.world.rank == 0:
                print(f"{name}, {rows} rows: {b' '.join(said).decode()}", flush=True)
        case.two.carrier.report()
        case.synchronize()
        case.two.carrier.check()
    case.world.close()
    sys.exit(failed)


if __name__ == "__main__":
    main()
