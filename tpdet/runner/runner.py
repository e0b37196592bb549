"""One rank's step: check the plan, update the tables, run the model over the plan's rows.

Shape suffixes: M rows of the step, R rows whose logits are wanted, V vocabulary.
"""

from collections.abc import Iterator
from functools import partial

import torch

from tpdet.audit.receipt import system_fingerprint
from tpdet.cache.kv import KeyValuePages, allocate_pages
from tpdet.cache.versions import VersionTable, first_difference
from tpdet.comm.device import current_device, resolve_device
from tpdet.comm.world.world import World, rank_on_node
from tpdet.config import EngineConfig
from tpdet.control.plan import StepPlan
from tpdet.errors import IntegrityError
from tpdet.kernels import ops
from tpdet.kernels.cpu import threads
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.layers.partition import make_partition
from tpdet.layers.row_layers import row_rule
from tpdet.models.halves import micro_batches
from tpdet.models.warm_up import pages_needed
from tpdet.runner.arithmetic_choice import ArithmeticChoice, strict_contract
from tpdet.runner.graphs.engine_graphs import Graphs, captures_graphs, make_graphs
from tpdet.runner.start.compile_ahead import CompilingAhead
from tpdet.runner.start.kernel_checks import (
    admit_products,
    agree_to_start,
    check_kernels,
    compare_answers,
    product_limits,
    threads_per_rank,
)
from tpdet.runner.start.loading import Loader, Tick, read_model
from tpdet.runner.start.memory import agreed_pages
from tpdet.runner.start.poison_check import poison_check
from tpdet.runner.start.start_times import StartTimes
from tpdet.runner.start.warming import warm_engine
from tpdet.runner.step.gpu_wait import wait_for_step
from tpdet.runner.step.heartbeat import compare_tables
from tpdet.runner.step.shared_rows import open_sharing
from tpdet.runner.step.step_rows import gather_rows
from tpdet.runner.step.taking import TakeLogits

LOGIT_ROWS = 256  # rows of the output head computed at once, at most
_SHARE_OF_TIMEOUT = 0.8
LOAD_TIMEOUT = 3600.0  # seconds the ranks may be apart while they read weights
_LOCAL_FACTS = ("model", "tokenizer", "chat_template")  # paths may differ from host to host


class Runner:
    """This rank's share of the model, its KV pages and its version table."""

    _pages: KeyValuePages | None = None
    _graphs: Graphs | None = None
    num_pages = 0

    def __init__(self, config: EngineConfig, world: World) -> None:
        """Load the model. Every refusal (flags, checkpoint, ranks that differ) happens here."""
        self.times = StartTimes()
        self._world = world
        self._config = config
        kind = resolve_device(config.device)
        self.device = current_device(kind)
        ahead = config.compile_ahead and kind == "cuda"
        self._ahead = CompilingAhead(world, self.times, LOAD_TIMEOUT, ahead)
        directory, self.model_config, self.max_model_len = read_model(config)
        partition = make_partition(
            self.model_config, world, config.fold_order, config.leaves, config.row_layers
        )
        self.choice = ArithmeticChoice(config, world, strict_contract(config, partition, kind))
        if kind == "cpu":
            threads.configure(threads_per_rank(world.local_size))
        check_kernels(self.model_config, partition, kind)
        settings = config.model_dump(exclude={*_LOCAL_FACTS}) | {"contract": self.contract}
        agree_to_start(world, settings, self.model_config, kind)
        admits, limits = kind == "cuda" and not self.approximate, product_limits(config, LOGIT_ROWS)
        compare_answers(world, partition, self.device, limits if admits else None, self._ahead)
        self.times.mark("checks")
        world.set_timeout(max(LOAD_TIMEOUT, config.step_timeout))
        self._strict_exchange = row_rule(partition).open_exchange(
            config.transport,
            partition,
            max(config.max_num_batched_tokens, config.max_num_seqs),
            self._dtype,
            self.device,
        )
        partition = partition.by(self.choice.make(self._strict_exchange))
        self._exchange = partition.exchange
        self._loader = Loader(config, self.model_config, world, self.device)
        self.model, self.model_digest = self._loader.load(directory, partition, self.max_model_len)
        self.sharing = open_sharing(config, self._strict_exchange, partition, LOGIT_ROWS)
        self._key_heads = len(partition.key_heads)
        self.times.mark("load")
        if admits:
            admit_products(partition, self.device, limits)
            self.times.mark("admission")
        # Ids that the last step sampled, for the rows of the next one that was planned before.
        self._sampled = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        held = self._warm_up(config) if kind == "cuda" else 0
        shape = self.model_config, self._key_heads, self.max_model_len
        pages = agreed_pages(config, *shape, world, self.device, held)
        world.set_timeout(config.step_timeout)
        # A rank that waits in a kernel gives up before the host that waits for the kernel does.
        self._exchange.set_timeout(_SHARE_OF_TIMEOUT * config.step_timeout)
        self.reset_pages(pages)
        self.times.mark("pages and graphs")
        self._ahead.finish()
        self.choice.announce(self.fingerprint(approximate=True))

    @property
    def approximate(self) -> bool:
        """Whether the last step's arithmetic was approximate, or the first one's will be."""
        return self.choice.approximate

    @property
    def contract(self) -> str:
        """The contract id of the arithmetic in use."""
        return self.choice.contract()

    @property
    def system_fingerprint(self) -> str:
        """Names contract, model and architecture: what may change bits."""
        return self.fingerprint(self.approximate)

    def fingerprint(self, approximate: bool) -> str:
        """The system fingerprint of either arithmetic."""
        contract = self.choice.contract(approximate)
        return system_fingerprint(contract, self.model_digest, self.device.type)

    def check_poison(self) -> None:
        """The poison check over this rank's pages, none of which may be in use; collective."""
        assert self._pages is not None
        vocab_size = self.model_config.vocab_size
        poison_check(self.model, self._pages, vocab_size, self.max_model_len, self._world)

    def table_difference(self, table: VersionTable) -> str | None:
        """The first page at which `table` is not this rank's, as `first_difference`; or None."""
        return first_difference(table.snapshot(), self._table.snapshot())

    def reload(self, name: str, tick: Tick) -> None:
        """Take over the weights of model `name`, in place, so that graphs stay valid; collective.

        No step may be in flight. Raises as `Loader.reload`: after a ReloadError all is as before.
        """
        self._world.set_timeout(max(LOAD_TIMEOUT, self._config.step_timeout))
        try:
            self.model_digest = self._loader.reload(self.model, name, tick)
        finally:
            self._world.set_timeout(self._config.step_timeout)

    def reset_pages(self, pages: int) -> None:
        """Begin with an empty KV cache of `pages` pages; alike on every rank, no step in flight."""
        self._table = VersionTable(pages)
        if pages == self.num_pages:
            return  # a page may hold anything until it is written
        self.num_pages = pages
        self._graphs = None
        self._pages = None  # a GPU holds the old pages or the new ones, not both
        self._pages = self._allocate(pages + 1)  # one more, where pad rows write
        self._capture_graphs()

    def _capture_graphs(self) -> None:
        if self._pages is not None and captures_graphs(self._config, self.device):
            of = self.model, self._pages, self._sampled
            self._graphs = make_graphs(*of, self._config, self.max_model_len)

    def _allocate(self, pages: int) -> KeyValuePages:
        model = self.model_config
        return allocate_pages(
            model.num_layers, pages, self._key_heads, model.head_dim, self._dtype, self.device
        )

    def _warm_up(self, config: EngineConfig) -> int:
        pages = self._allocate(pages_needed(config.max_num_batched_tokens, self.max_model_len))
        sample = partial(self.sharing.warm_up, self.device)
        of = self.model, pages, self._sampled, config, self.max_model_len, LOGIT_ROWS
        held = warm_engine(*of, self._ahead, sample)
        self.times.mark("warm-up")
        return held

    def close(self) -> None:
        """Let go of graphs and pages. Before the world closes: NCCL waits for its last graph."""
        self._ahead.close()
        self._graphs = self._pages = None
        self.num_pages = 0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def launch(self, plan: StepPlan, results: TakeLogits) -> torch.cuda.Event | None:
        """Start one plan on this rank; its logits go to `results`, in the rows' order.

        On a GPU nothing is waited for: the event is for `wait`. Raises IntegrityError when this
        rank's version table is not the sender's, or when a row may not read the pages it names.
        """
        self._table.apply(plan.events)
        if self._table.digest() != plan.table_digest:
            raise IntegrityError.in_public(
                f"step {plan.step}: the page table of {rank_on_node(self._world)} has digest "
                f"{self._table.digest().hex()[:16]}, that of {rank_on_node(self._world, 0)} has "
                f"{plan.table_digest.hex()[:16]}"
            )
        self._table.check_readers(plan.rows)
        if self.choice.follow(plan):
            self._change_arithmetic()
        if not plan.rows:
            compare_tables(self._world, self._table, plan.step)
            return None
        sampled = self._sample(plan, results)
        if plan.feeds:
            # -1 (a row that found no token, and fails) must not be read as an id.
            self._sampled[: len(sampled)].copy_(sampled.clamp(min=0))
        if self.device.type == "cpu":
            return None
        self._exchange.report()
        event = torch.cuda.Event()
        event.record()
        return event

    def _change_arithmetic(self) -> None:
        """Compute by the chosen arithmetic from now on; every rank does so at the same plan.

        Graphs are captured anew, which takes as long as at start: nobody is lost meanwhile.
        """
        self._world.set_timeout(max(LOAD_TIMEOUT, self._config.step_timeout))
        self._graphs = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # what the graphs held
        arithmetic = self.choice.make(self._strict_exchange)
        self._exchange = arithmetic.exchange
        self.model.adopt(arithmetic)
        self._capture_graphs()
        self._world.barrier()
        self._world.set_timeout(self._config.step_timeout)

    def wait(self, plan: StepPlan, event: torch.cuda.Event | None) -> None:
        """Wait for a launched plan, no longer than the world does. Raises PeerLostError."""
        if event is not None:
            wait_for_step(plan.step, event, self._world)
            self._exchange.check()

    def _sample(self, plan: StepPlan, results: TakeLogits) -> torch.Tensor:
        """Run the model and sample: ids int64 [n] of the step's tokens.

        They are equal on every rank if the plan feeds the next one; else rank 0 has them.
        """
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        if plan.row_sampling:
            sampled = self.sharing.take_all(plan, self._shards(plan), results.take_shared)
            return torch.cat([none, *sampled])
        if plan.shards:
            size = self.model_config.vocab_size
            shard = Shard(self.model.first_local_id, size, self._exchange.all_gather)
            sampled = [results.take_shard(logits_RV, shard) for _, logits_RV in self._shards(plan)]
            return torch.cat([none, *sampled])
        sampled = [
            results.take(first, self.model.whole_logits(logits_RV))
            for first, logits_RV in self._shards(plan)
        ]
        ids = torch.cat([none, *sampled])
        if plan.feeds and self._world.size > 1:
            ids = self._world.all_gather(ids)[0]
        return ids

    def _shards(self, plan: StepPlan) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's columns of the wanted logits, in blocks: (first row, fp32 [<= 256, V'])."""
        if self._graphs is not None and self._graphs.decode.takes(plan.rows):
            yield 0, self._graphs.decode.run(plan.rows)
            return
        x_RH, wanted = self._run(plan), sum(row.logits for row in plan.rows)
        for first in range(0, len(x_RH), LOGIT_ROWS):
            logits_RV = self.model.local_logits(x_RH[first : first + LOGIT_ROWS])
            if first < wanted:  # the pads' come last
                yield first, logits_RV[: wanted - first]

    def _run(self, plan: StepPlan) -> torch.Tensor:
        """The model over a plan's rows; the normed rows whose logits are wanted, then the pads'."""
        if self._graphs is not None and (x_RH := self._graphs.hidden(plan.rows)) is not None:
            return x_RH
        step = gather_rows(plan.rows, self._config.fixed_batch or 0, self.num_pages)
        assert self._pages is not None
        both = torch.tensor(step.token_ids + step.wanted, dtype=torch.int64)
        if self.device.type == "cuda":
            both = both.pin_memory().to(self.device, non_blocking=True)
        batches = micro_batches(step.sequences, self.device, self.model.exchanges_aside)
        ids_M, wanted_R = both.split([len(step.token_ids), len(step.wanted)])
        ids_M = ops.resolve_sampled(ids_M, self._sampled)
        return self.model.hidden(ids_M, self._pages, *batches)[wanted_R]

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.model_config.dtype)
