"""The engine: rank 0 decides, everyone runs, rank 0 commits.

On a GPU the next step is planned and launched while one is pending, so that the GPU never waits for
the host. The rows of that next step name the tokens that the pending one samples.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

import msgspec
import torch

from tpdet.audit.replay import request_seed
from tpdet.comm.world.exit_reasons import reporting_exit
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.control.plan import StepPlan, WholeRows
from tpdet.control.weight_orders import LoadModel, WeightOrder
from tpdet.engine.arithmetic_switch import ArithmeticSwitch
from tpdet.engine.calibration import calibrate
from tpdet.engine.control import ControlChannel
from tpdet.engine.fault_points import FaultPoints
from tpdet.engine.interventions import Interventions
from tpdet.engine.pooling import open_pooler, with_pooled
from tpdet.engine.results import LogitsTap, StepResults
from tpdet.engine.routed import with_routes
from tpdet.engine.slowdown import SlowdownWatch
from tpdet.engine.weight_update import EngineWeights
from tpdet.errors import (
    IntegrityError,
    NumericalError,
    ReloadError,
    RequestError,
    WeightUpdateError,
)
from tpdet.grammar.lazy import LazyGrammars
from tpdet.requests.pooling_params import NOT_POOLED
from tpdet.requests.request import (
    PooledOutput,
    PromptOutput,
    Request,
    RequestFailed,
    TokenOutput,
    check_against_model,
    with_seed,
)
from tpdet.requests.seeds import Seeds
from tpdet.requests.weight_versions import WeightVersions
from tpdet.runner import Follower, Runner, TakeLogits, Tick
from tpdet.scheduler.limits import check_drafts
from tpdet.scheduler.observers import StepObserver
from tpdet.scheduler.scheduler import Scheduler
from tpdet.scheduler.speculator import Speculator
from tpdet.scheduler.statistics import SchedulerStatistics
from tpdet.speculative.draft_model.start import start_draft_model
from tpdet.speculative.speculator import DraftSpeculator

EngineOutput = TokenOutput | PromptOutput | RequestFailed | PooledOutput


class _LaunchedStep(NamedTuple):
    """A step that was launched and is not committed; synchronous: it was planned by all results.

    weights: the number of the weights that compute it.
    """

    plan: StepPlan
    results: StepResults
    event: torch.cuda.Event | None
    synchronous: bool
    weights: int


_log = logging.getLogger("tpdet.engine")


class Engine:
    """One model over one world.

    On rank 0: `submit`, `abort`, `step` (or `heartbeat` when idle), then `stop_workers`. On the
    other ranks: `worker_loop`. For verification, `tap` sees every row's logits on rank 0, and a
    loaded `runner`, whose pages were reset, can be used again. `run_ahead` overrides whether steps
    overlap: on a GPU they do. `streams`: readers wait for each token, so steps in which sequences
    decode stay short (`runner/start/step_tokens.py`); otherwise they are as large as any. `secret`
    is the run secret, which seals what rank 0 sends to the others (`control`). `faults` are for
    tests. `clock` times steps (seconds). `speculator` stands in for what the configuration says.
    """

    def __init__(
        self,
        config: EngineConfig,
        world: World,
        tap: LogitsTap | None = None,
        preempt_every: int = 0,
        runner: Runner | None = None,
        run_ahead: bool | None = None,
        secret: bytes | None = None,
        faults: FaultPoints | None = None,
        clock: Callable[[], float] = time.perf_counter,
        streams: bool = True,
        speculator: Speculator | None = None,
    ) -> None:
        self.config, self.world = config, world
        self.faults = faults or FaultPoints((), world.rank)
        with reporting_exit(world, lambda: "the start"):
            self.control = ControlChannel(world, secret)
            # First, so that the model's own pages are counted in the memory that is left.
            self.draft_model = None if runner else start_draft_model(config, world)
            self.runner = runner or Runner.start(config, world)
        self.arithmetic = ArithmeticSwitch(config, world, self.runner.contracts)
        if runner is None:
            self.arithmetic.announce(self.runner.fingerprint(approximate=True))
        self.model_config, self.max_model_len = self.runner.model_config, self.runner.max_model_len
        self.pooler = open_pooler(config, self.model_config)
        self.grammars = LazyGrammars(config, self.model_config.vocab_size)
        self.run_ahead = self.runner.device.type == "cuda" if run_ahead is None else run_ahead
        tokens = self.runner.step_tokens.of_engine(config.max_num_batched_tokens, streams)
        if world.rank == 0 and runner is None:
            _log.info("%s", tokens)
        self.scheduler = Scheduler(
            max_num_seqs=config.max_running,
            max_num_batched_tokens=tokens.most,
            mixed_step_tokens=tokens.mixed,
            step_seconds=tokens.seconds,
            num_pages=self.runner.num_pages,
            max_queue=config.max_queue,
            max_model_len=self.max_model_len,
            preempt_every=preempt_every,
            prefix_identity=self._prefix_identity(),
            constrain=self.grammars.constrain,
            speculator=speculator or self._speculator(),
            state_room=self.runner.state_room,
            follows_drafts=self.run_ahead and tap is None and self._samples_only,
        )
        self.watch = SlowdownWatch(config.max_slowdown, clock) if config.on_slowdown else None
        self._tap, self._seeds = tap, Seeds(config.seed)
        self.versions = WeightVersions(self.runner.model_digest)
        self.interventions = Interventions(
            self.scheduler, self._settle, self._prefix_identity, lambda: self.weights.usable
        )
        self._pending: list[_LaunchedStep] = []  # oldest first
        self.weights = EngineWeights(
            self.runner.weights,
            self.versions,
            self._lead,
            lambda: bool(self._pending),
            self._adopt_weights,
        )

    @property
    def approximate(self) -> bool:
        """Whether answers are computed by stock arithmetic from now on."""
        return self.arithmetic.approximate

    @property
    def system_fingerprint(self) -> str:
        """Names contract, model and architecture of what is answered now."""
        return self.runner.fingerprint(self.approximate)

    @property
    def gauges(self) -> dict[str, float]:
        """How long the start took, whether the arithmetic is approximate, its slowdown.

        And bytes of linear-attention states that a rank keeps of a sequence and of a snapshot.
        """
        ratio = None if self.watch is None else self.watch.ratio
        slowdown = {} if ratio is None else {"slowdown_ratio": ratio}
        start = {"start_seconds": self.runner.times.total}
        states = {
            f"{kind}_state_bytes": size for kind, size in self.runner.loaded.state_bytes.items()
        }
        return start | states | {"approximate": float(self.approximate)} | slowdown

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_work

    def submit(self, request: Request) -> int:
        """Queue a request; returns its seed: where it has none, what `seed_policy` says.

        Raises RequestError for what the model cannot serve and OverloadedError when full.
        """
        check_against_model(request, self.model_config.vocab_size, self.max_model_len)
        check_drafts(request, self.config.fixed_batch, self.approximate)
        if self.pooler is not None:
            request = self.pooler.resolved(request)
        elif request.pooling is not None:
            raise RequestError(NOT_POOLED, "task")
        if self.runner.routes is not None and request.params.stop:
            raise RequestError(
                "experts of answers that stop strings end are not returned: use stop_token_ids",
                "stop",
            )
        if request.prediction and (self.approximate or not self.config.drafters):
            request = msgspec.structs.replace(request, prediction=())  # only a hint
        seed = request.params.seed
        if seed is None:
            by_itself = self.config.seed_policy == "request"
            seed = request_seed(request) if by_itself else self._seeds.next()
            request = with_seed(request, seed)
        self.scheduler.add(request)
        return seed

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Drop a request, or one choice of it; unknown ids are ignored."""
        self.scheduler.abort(request_id, choice)

    def calibrate(self) -> None:
        """Measure what `on_slowdown` compares with; on rank 0, before anything else is asked."""
        if self.watch is not None:
            calibrate(self, self.watch)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[EngineOutput]:
        """Commit one step, and return what readers should hear, in order.

        What may follow it is launched first, and what must know its results before they are
        returned: on a GPU the caller's work is never what the next step waits for. meanwhile: what
        the caller does while the step runs; it asks nothing of the engine.
        """
        if not self.weights.usable:
            raise WeightUpdateError("the weights are incomplete: no step is made by them", 503)
        self._begin_step()
        if not self._pending and not self._launch(self.scheduler.schedule()):
            return []
        if self._runs_ahead:
            self._launch(self.scheduler.schedule_ahead())
        meanwhile()
        outputs = self._commit(self._wait())
        if self._runs_ahead and not self._pending:
            self._launch(self.scheduler.schedule())
        return outputs

    def heartbeat(self) -> None:
        """Send an empty plan: every rank answers with the digest of its page table.

        Raises IntegrityError, on every rank, when two ranks' tables differ.
        """
        self._send(self._empty_plan(), Follower(0))

    def check_integrity(self) -> None:
        """Look through rank 0's own books; for idle time. Raises IntegrityError.

        Every page is free, cached or held by whom the scheduler thinks, and the table by which
        plans are made is the one by which this rank runs them.
        """
        self.scheduler.check_integrity()
        pages = self.scheduler.policy.page_manager
        if pages.has_events:
            return  # the runner hears of them with the next plan
        states = None if pages.states is None else pages.states.table
        difference = self.runner.table_difference(pages.table, states)
        if difference is not None:
            raise IntegrityError(f"scheduler and runner of rank 0 differ: {difference}")

    def reload(self, model: str, tick: Tick = lambda: None) -> None:
        """Serve the weights of another checkpoint of the same shapes from now on.

        Every rank checks the whole checkpoint before a byte is overwritten; the prefix cache
        forgets the pages of the old weights, and every page's version is bumped. `tick` is called
        after each tensor. Requests that torn weights hold up go on under the new ones. Raises
        IntegrityError while others run (drain first) or when the checkpoint changes meanwhile,
        ReloadError when it is refused: nothing has changed then.
        """
        if self.has_work and self.weights.usable:
            raise IntegrityError("a reload while requests run: drain first")
        self.weights.refuse_reload()
        self._lead(LoadModel(model), tick)
        self.versions.advance(self.runner.model_digest)
        self.weights.reloaded()
        self._adopt_weights()

    def stop_workers(self) -> None:
        """End the other ranks' `worker_loop`; they may enter it again."""
        self._settle()
        self._send(self._empty_plan(stop=True), Follower(0))

    def worker_loop(self) -> None:
        """Run plans from rank 0 until one says stop (ranks above 0)."""
        with self._reporting_exit():
            while True:
                plan = self.control.receive_plan()
                self._start(plan, Follower(int(plan.rows.samples.sum())))
                if plan.weights is not None:
                    with suppress(ReloadError):  # rank 0 raises the same, and answers for all
                        self.runner.obey(plan.weights, lambda: None)
                if plan.stop:
                    return

    def close(self) -> None:
        """Let go of the model's graphs and leave the world; all ranks together."""
        if self.draft_model is not None:
            self.draft_model.close()
        self.runner.close()
        self.world.close()

    def statistics(self) -> SchedulerStatistics:
        """Gauges and totals of the scheduler."""
        return self.scheduler.statistics()

    @property
    def _observers(self) -> list[StepObserver]:
        watched = [] if self.watch is None else [self.watch]
        return [*watched, self.scheduler.speculator]

    @property
    def _samples_only(self) -> bool:
        """Whether rows of decoding sequences give tokens and fill KV pages, and nothing else."""
        others = self.pooler, self.runner.routes, self.runner.state_room
        return all(other is None for other in others) and not self.config.fixed_batch

    def _speculator(self) -> Speculator:
        """What drafts for rows; nothing does where a step's rows are fixed or reach the bits."""
        if self.config.fixed_batch or self.config.approximate:
            return Speculator()
        return DraftSpeculator(self.config.drafters, self.run_ahead, model=self.draft_model)

    @property
    def _is_slow(self) -> bool:
        """Whether strict steps have become too slow, so that the approximate mode is due."""
        return self.watch is not None and bool(self.watch.slow) and not self.approximate

    @property
    def _runs_ahead(self) -> bool:
        """Whether steps overlap; before a change of arithmetic the pending ones come to an end."""
        return self.run_ahead and not self._is_slow

    def _begin_step(self) -> None:
        """Change the arithmetic if that is due; the next plan takes every rank along."""
        if self._is_slow and not self._pending:
            assert self.watch is not None
            self.watch.alarm(self.runner.fingerprint(approximate=True))
            self.arithmetic.turn()
            self.scheduler.restart(self._prefix_identity())
        for observer in self._observers:
            observer.begin(bool(self._pending))

    def _launch(self, plan: StepPlan | None) -> bool:
        """Send a plan to every rank and start it here; False where there is none."""
        if plan is None:
            return False
        latest = self.scheduler.latest(plan)
        results = StepResults(latest, self._tap, self.config.processes_logprobs)
        plan = msgspec.structs.replace(
            plan,
            feeds=self.run_ahead,
            sampling=results.sampling(self.runner.sharing) if self.run_ahead else WholeRows(),
            approximate=self.approximate,
        )
        synchronous = not self._pending
        event = self._send(plan, results)
        weights = self.versions.number
        self._pending.append(_LaunchedStep(plan, results, event, synchronous, weights))
        return True

    def _wait(self) -> _LaunchedStep:
        """The oldest launched step, once it has run."""
        for observer in self._observers:
            observer.running()
        step = self._pending.pop(0)
        with self._reporting_exit():
            self.runner.wait(step.plan, step.event, urgent=not self._pending)
        step.results.finish()
        for observer in self._observers:
            observer.end(step.plan, step.synchronous)
        return step

    def _commit(self, step: _LaunchedStep) -> list[EngineOutput]:
        """The outputs of a step that has run: failures, then tokens and prompts' scores."""
        plan, results, routes = step.plan, step.results, self.runner.routes
        answers, unsound = ({}, {}) if self.pooler is None else self.pooler.answers(results.pooled)
        results.failures.update(unsound)
        failed = [
            self.scheduler.fail(request_id, NumericalError.code, reason)
            for request_id, reason in results.failures.items()
        ]
        pages = {} if routes is None else results.pages()
        outputs = self.scheduler.commit(
            plan.step,
            results.sampled,
            results.scores,
            plan.approximate,
            results.runs,
            step.weights,
        )
        if routes is not None:
            outputs = with_routes(outputs, pages, routes)
        if answers:
            outputs = with_pooled(outputs, answers)
        if not self.has_work:
            for observer in self._observers:
                observer.idle()
        return [failure for failure in failed if failure is not None] + outputs

    def _settle(self) -> list[EngineOutput]:
        """Commit every step that was launched, and launch none; what readers should hear."""
        outputs: list[EngineOutput] = []
        while self._pending:
            outputs += self._commit(self._wait())
        return outputs

    def _prefix_identity(self) -> bytes | None:
        return self.runner.prefix_identity(self.config, self.approximate)

    def _empty_plan(self, stop: bool = False, weights: WeightOrder | None = None) -> StepPlan:
        plan = self.scheduler.heartbeat(stop)
        return msgspec.structs.replace(plan, weights=weights, approximate=self.approximate)

    def _lead(self, order: WeightOrder, tick: Tick) -> str | None:
        """Have every rank do what an order says about the weights; as `Runner.obey`."""
        self._send(self._empty_plan(weights=order), Follower(0))
        with self._reporting_exit():
            return self.runner.obey(order, tick)

    def _adopt_weights(self) -> None:
        """Compute by other weights from now on: no page of the old ones is read again."""
        self.interventions.recompute(other_weights=True)
        self.heartbeat()

    def _send(self, plan: StepPlan, results: TakeLogits) -> torch.cuda.Event | None:
        with reporting_exit(self.world, lambda: f"step {plan.step}"):
            return self._start(self.control.send_plan(plan), results)

    def _reporting_exit(self) -> AbstractContextManager[None]:
        return reporting_exit(self.world, lambda: self.control.place)

    def _start(self, plan: StepPlan, results: TakeLogits) -> torch.cuda.Event | None:
        plan, results = self.faults.meet(plan, results)
        if self.arithmetic.follow(plan):
            self.runner.compute_by(plan.approximate)
        return self.runner.launch(plan, results)
