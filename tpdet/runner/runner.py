"""One rank's step: check the plan, update the tables, run the model over the plan's rows.

Shape suffixes: M rows of the step, R rows whose logits are wanted, V vocabulary.
"""

from collections.abc import Iterator

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.cache.routes import Routes
from tpdet.cache.state_table import StateTable, first_state_difference
from tpdet.cache.versions import VersionTable, first_difference
from tpdet.comm.world.world import World, rank_on_node
from tpdet.config import EngineConfig
from tpdet.control.plan import PlanRows, StepPlan
from tpdet.control.weight_orders import WeightOrder
from tpdet.errors import IntegrityError
from tpdet.kernels import ops
from tpdet.kernels.inputs.paged_batch import make_batch
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.launch.life.garbage import no_garbage
from tpdet.layers.arithmetic import make_arithmetic
from tpdet.models.decoder import Unfinished
from tpdet.models.fingerprint import system_fingerprint
from tpdet.models.micro_batches import micro_batches
from tpdet.runner.graphs.decode_chain import DecodeChain
from tpdet.runner.graphs.draft_moves import DraftMoves
from tpdet.runner.graphs.engine_graphs import Graphs, captures_graphs, make_graphs
from tpdet.runner.rank_weights import RankWeights
from tpdet.runner.start.load_model import LOAD_TIMEOUT, load_model
from tpdet.runner.start.loaded_model import WarmedModel
from tpdet.runner.start.loading import Tick
from tpdet.runner.start.poison_check import poison_check
from tpdet.runner.start.start_times import MAKING_PAGES, StartTimes, naming_memory
from tpdet.runner.step.gpu_wait import wait_for_step
from tpdet.runner.step.state_events import apply_state_events
from tpdet.runner.step.step_rows import gather_rows
from tpdet.runner.step.taking import LogitBlock, TakeLogits


class Runner:
    """Steps of one loaded model over this rank's KV pages and version table."""

    pages: KeyValuePages | None = None
    graphs: Graphs | None = None
    num_pages = 0
    states: StateTable | None = None
    """What is in the slots of linear-attention states; None for a model without such layers."""
    routes: Routes | None = None
    """Which experts cached positions chose; on rank 0, if the configuration asks for it."""
    _closed = False

    def __init__(self, warmed: WarmedModel) -> None:
        """Allocate the pages and capture the graphs; collective."""
        loaded = self.loaded = warmed.loaded
        self._world, self._config, self.device = loaded.world, loaded.config, loaded.device
        self.model_config, self.max_model_len = loaded.model_config, loaded.max_model_len
        self.model, self.model_digest = loaded.decoder, warmed.digest
        self.contracts, self.sharing, self.times = loaded.contracts, loaded.sharing, loaded.times
        self.sampled, self.step_tokens = loaded.sampled, loaded.step_tokens
        self._architecture = loaded.architecture
        timeout = loaded.config.weights_timeout
        self.weights = RankWeights(loaded.loader, self.model, loaded.world, loaded.device, timeout)
        self.state_room = warmed.state_room
        self.reset_pages(warmed.num_pages)

    @classmethod
    def start(cls, config: EngineConfig, world: World) -> "Runner":
        """Load the model, and be ready to step. Raises as `load_model`."""
        times = StartTimes()
        with no_garbage(), naming_memory(config, times):
            warmed = load_model(config, world, times)
            times.doing = MAKING_PAGES
            runner = cls(warmed)
        times.mark("pages and graphs")
        runner.loaded.ahead.finish()
        return runner

    def fingerprint(self, approximate: bool, digest: str | None = None) -> str:
        """The system fingerprint of answers by one arithmetic: what may change their bits.

        A closed runner names it too. digest: of the weights; the present ones by default.
        """
        contract = self.contracts.of(approximate)
        return system_fingerprint(contract, digest or self.model_digest, self._architecture)

    def prefix_identity(self, config: EngineConfig, approximate: bool) -> bytes | None:
        """Names what an engine's pages are computed under; None where it shares none.

        config: the engine's. For verification it need not be what this runner was started with.
        """
        if not config.enable_prefix_caching or config.enable_return_routed_experts:
            return None
        return f"{self.model_digest}\n{self.contracts.of(approximate)}".encode()

    @property
    def tensor_digests(self) -> dict[str, str]:
        """The digest of each tensor, by the name that the checkpoint or the sender gives it."""
        return self.loaded.loader.tensor_digests

    def check_poison(self) -> None:
        """The poison check over this rank's pages, none of which may be in use; collective."""
        assert self.pages is not None
        vocab_size = self.model_config.vocab_size
        poison_check(self.model, self.pages, vocab_size, self.max_model_len, self._world)

    def table_difference(self, table: VersionTable, states: StateTable | None) -> str | None:
        """The first page, or slot of states, at which tables are not this rank's; None if all are.

        As `first_difference` and `first_state_difference`.
        """
        difference = first_difference(table.snapshot(), self.table.snapshot())
        if difference is None and states is not None and self.states is not None:
            difference = first_state_difference(states.snapshot(), self.states.snapshot())
        return difference

    def obey(self, order: WeightOrder, tick: Tick) -> str | None:
        """Do what an order says about the weights, in place: graphs stay valid. Collective.

        The model's digest where the weights are whole then. No step may be pending. Raises as
        `RankWeights.obey`.
        """
        self._world.set_timeout(max(LOAD_TIMEOUT, self._config.step_timeout))
        try:
            digest = self.weights.obey(order, tick)
        finally:
            self._world.set_timeout(self._config.step_timeout)
        self.model_digest = digest or self.model_digest
        return digest

    def reset_pages(self, pages: int) -> None:
        """Begin with an empty KV cache of `pages` pages; alike on every rank, no step pending."""
        self.table = VersionTable(pages)
        self.states = None if self.state_room is None else StateTable(*self.state_room)
        if pages == self.num_pages:
            return  # a page may hold anything until it is written
        self.num_pages = pages
        self.graphs = None
        self.pages = None  # a GPU holds the old pages or the new ones, not both
        # One more, where pad rows write.
        self.pages = self.loaded.allocate_pages(pages + 1, self.state_room)
        if self._config.enable_return_routed_experts:
            if self._world.rank == 0:
                self.routes = Routes(self.model_config, pages + 1, self.device)
            self.model.keep_routes(None if self.routes is None else self.routes.layers)
        self.capture_graphs()

    def capture_graphs(self) -> None:
        """Capture the graphs of these pages, where the device and the settings have any."""
        if self.pages is not None and captures_graphs(self._config, self.device):
            of = self.model, self.pages, self.sampled
            self.graphs = make_graphs(*of, self._config, self.step_tokens.most, self.max_model_len)
            torch.cuda.empty_cache()  # steps use another stream than the captures did

    def close(self) -> None:
        """Let go of graphs and pages, and of weights that no peer may be reading; for good.

        Before the world closes: NCCL waits for its last graph. A second time is harmless.
        """
        if self._closed:
            return
        self._closed = True
        self.loaded.ahead.close()
        self.graphs = self.pages = None
        self.num_pages = 0
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
        if self._world.size == 1:
            self.weights.close()
            del self.loaded, self.model, self.sharing, self.sampled
            self.routes = None
        if on_gpu:
            torch.cuda.empty_cache()

    def decode_chain(self) -> DecodeChain | None:
        """Steps that need no plan between them; None without graphs, or where ranks are several."""
        if self.graphs is None or self._world.size > 1:
            return None
        vocab_size = self.model_config.vocab_size
        return DecodeChain(self.graphs, self.model, self.sampled, vocab_size)

    def launch(self, plan: StepPlan, results: TakeLogits) -> torch.cuda.Event | None:
        """Start one plan on this rank; its logits go to `results`, in the rows' order.

        On a GPU nothing is waited for: the event is for `wait`. Raises IntegrityError when this
        rank's version table is not the sender's, or when a row may not read the pages it names.
        """
        self.table.apply(plan.events)
        self._compare_digest(plan.step, "page", self.table.digest(), plan.table_digest)
        self.table.check_readers(plan.rows)
        if self.states is not None:
            self._follow_states(self.states, plan)
        if not len(plan.rows):
            _compare_tables(self._world, self.table, self.states, plan.step)
            return None
        sampled = self._sample(plan, results)
        if plan.feeds:
            # -1 (a row that found no token, and fails) must not be read as an id.
            self.sampled[: len(sampled)].copy_(sampled.clamp(min=0))
        if self.device.type != "cpu":
            self.model.exchange.carrier.report()
        return self.event()

    def event(self) -> torch.cuda.Event | None:
        """After all that was launched on this rank's GPU; None on a CPU, which has done it."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def compute_by(self, approximate: bool) -> None:
        """Change to one arithmetic between two steps; every rank does so before the same plan.

        Graphs are captured anew, which takes as long as at start; no rank counts as lost meanwhile.
        """
        self._world.set_timeout(max(LOAD_TIMEOUT, self._config.step_timeout))
        self.graphs = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # what the graphs held
        self.model.adopt(make_arithmetic(approximate, self._world, self.loaded.strict_exchange))
        self.capture_graphs()
        self._world.barrier()
        self._world.set_timeout(self._config.step_timeout)

    def wait(self, plan: StepPlan, event: torch.cuda.Event | None, urgent: bool) -> None:
        """Wait for a launched plan, no longer than the world does. Raises PeerLostError.

        urgent: no other plan was launched after it.
        """
        if event is not None:
            wait_for_step(plan.step, event, self._world, urgent)
            self.model.exchange.carrier.check()

    def _compare_digest(self, step: int, kind: str, own: bytes, sent: bytes) -> None:
        """Raise IntegrityError where a table of this rank is not the sender's."""
        if own != sent:
            raise IntegrityError.in_public(
                f"step {step}: the {kind} table of {rank_on_node(self._world)} has digest "
                f"{own.hex()[:16]}, that of {rank_on_node(self._world, 0)} has {sent.hex()[:16]}"
            )

    def _follow_states(self, table: StateTable, plan: StepPlan) -> None:
        """Do to the states what a plan says, in the table and in memory; its rows come next."""
        table.apply(plan.states)
        self._compare_digest(plan.step, "state", table.digest(), plan.state_digest)
        table.check_rows(plan.rows)
        table.advance(plan.rows)
        assert self.pages is not None and self.pages.states is not None
        apply_state_events(self.pages.states, plan.states)

    def _sample(self, plan: StepPlan, results: TakeLogits) -> torch.Tensor:
        """Run the model and sample: ids int64 [n] of the step's tokens.

        They are equal on every rank if the plan feeds the next one; else rank 0 has them.
        """
        together = self.sharing.follow(plan)
        sampled = []
        moves = DraftMoves(plan.rows, self.sampled) if plan.rows.expected else None
        for first, logits_RV in self.sharing.cut(plan, self._shards(plan.rows, moves)):
            rows = logits_RV if together is not None else self.model.whole_logits(logits_RV)
            moved = None if moves is None else moves.moved[first : first + len(rows)]
            sampled.append(results.take(LogitBlock(first, rows, together, moved)))
        if len(sampled) == 1:
            ids = sampled[0]
        else:
            ids = torch.cat([torch.empty(0, dtype=torch.int64, device=self.device), *sampled])
        if together is None and plan.feeds and len(ids) and self._world.size > 1:
            ids = self._world.all_gather(ids)[0]
        return ids

    def _shards(
        self, rows: PlanRows, moves: DraftMoves | None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's columns of the wanted logits, in blocks: (first row, fp32 [r, V']).

        moves: of rows behind unverified drafts. Without a graph the step before is waited for.
        """
        if self.graphs is not None and (whole := self.graphs.logits(rows, moves)) is not None:
            yield 0, whole
            return
        if moves is not None:
            rows = moves.settle()
        x_RH, wanted = self._run(rows), int(rows.logits.sum())
        for first in range(0, len(x_RH), HEAD_ROWS):
            logits_RV = self.model.local_logits(x_RH[first : first + HEAD_ROWS])
            if first < wanted:  # the pads' come last
                yield first, logits_RV[: wanted - first]

    def _run(self, rows: PlanRows) -> torch.Tensor:
        """The model over a plan's rows; the normed rows whose logits are wanted, then the pads'."""
        if self.graphs is not None and (x_RH := self.graphs.hidden(rows)) is not None:
            return x_RH
        assert self.pages is not None
        pad_slot = -1 if self.pages.states is None else self.pages.states.pad_slot
        step = gather_rows(rows, self._config.fixed_batch or 0, self.num_pages, pad_slot)
        both = torch.tensor(step.token_ids + step.wanted, dtype=torch.int64)
        if self.device.type == "cuda":
            both = both.pin_memory().to(self.device, non_blocking=True)
        batches = micro_batches(step.sequences, self.device, self.model.overlaps_exchanges)
        parts = tuple(batch.row_count for batch in batches)
        ids_M, wanted_R = both.split([len(step.token_ids), len(step.wanted)])
        ids_M = ops.resolve_sampled(ids_M, self.sampled)
        if len(step.wanted) == len(step.token_ids) or not self.model.finishes_some:
            return self.model.hidden(ids_M, self.pages, *batches)[wanted_R]
        begun = Unfinished.joined(self.model.begin(ids_M, self.pages, *batches))
        some = self.model.some(begun, wanted_R, parts)
        return self.model.finish([some], self.pages, make_batch(step.ends, self.device))


def _compare_tables(
    world: World, table: VersionTable, states: StateTable | None, step: int
) -> None:
    """Return if all ranks' tables are equal at a step.

    Raises IntegrityError, on every rank, naming the first rank that differs from rank 0, both
    nodes and digests, and the page or the slot of states.
    """
    if states is not None:
        _compare_state_tables(world, states, step)
    digests = world.gather_bytes(table.full_digest())
    if all(digest == digests[0] for digest in digests):
        return
    snapshots = world.gather_bytes(table.snapshot())
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    difference = first_difference(snapshots[0], snapshots[rank]) or "in their history alone"
    raise IntegrityError.in_public(
        f"step {step}: page tables of {rank_on_node(world, 0)} (digest {digests[0].hex()[:16]})"
        f" and {rank_on_node(world, rank)} (digest {digests[rank].hex()[:16]}) differ: {difference}"
    )


def _compare_state_tables(world: World, states: StateTable, step: int) -> None:
    digests = world.gather_bytes(states.full_digest())
    snapshots = world.gather_bytes(states.snapshot())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            difference = first_state_difference(snapshots[0], snapshots[rank])
            raise IntegrityError.in_public(
                f"step {step}: state tables of {rank_on_node(world, 0)} and "
                f"{rank_on_node(world, rank)} differ: {difference or 'in their history alone'}"
            )
