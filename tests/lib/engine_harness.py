"""Runs requests through an engine over threads and logs every logit that was looked at."""

from dataclasses import dataclass, field

import torch

from tests.lib.thread_world import run_threads
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.requests.request import PromptOutput, Request, RequestFailed, SamplingParams, TokenOutput
from tpdet.speculative.fixed import FixedSpeculator
from tpdet.speculative.speculator import DraftSpeculator


@dataclass
class Run:
    """What one run gave: logits by (request, choice, position), outputs by request."""

    logits: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, list] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    steps: int = 0
    preemptions: int = 0
    hits: list[int] = field(default_factory=list)
    """Tokens read from the prefix cache, by wave."""

    def cached(self, name: str, choice: int = 0) -> int:
        """Prompt tokens that one choice read from the prefix cache."""
        return sum(
            o.cached_tokens
            for o in self.outputs[name]
            if isinstance(o, TokenOutput) and o.choice == choice
        )

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        """Tokens of one choice."""
        return [
            o.token_id
            for o in self.outputs[name]
            if isinstance(o, TokenOutput) and o.choice == choice and o.token_id >= 0
        ]

    def answer(self, name: str, choice: int = 0) -> list[TokenOutput]:
        """Everything said of one choice, but for the request's name."""
        return [
            (o.token_id, o.logprob, o.top, o.finish_reason, o.stop_token_id)
            for o in self.outputs[name]
            if isinstance(o, TokenOutput) and o.choice == choice
        ]

    def failure(self, name: str) -> RequestFailed | None:
        """The failure of a request, if it failed."""
        return next((o for o in self.outputs[name] if isinstance(o, RequestFailed)), None)

    def prompt(self, name: str) -> PromptOutput | None:
        """The prompt's scores, if there are."""
        return next((o for o in self.outputs[name] if isinstance(o, PromptOutput)), None)


def ask(name: str, prompt, tenant="", salt="", drafts=(), **params) -> Request:
    """A request; greedy, eight tokens, no end token unless told otherwise."""
    settings = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**settings),
        tenant_salt=tenant,
        cache_salt=salt,
        drafts=drafts,
    )


def small_config(model, **settings) -> EngineConfig:
    """Of an engine of four sequences; every setting may be overridden."""
    given = {"kv_pages": 24, "max_num_seqs": 4, "max_num_batched_tokens": 200, "drafts": "off"}
    return EngineConfig.from_values(model=str(model), **{"max_model_len": 1024} | given | settings)


def leave_out_freely(engine):
    """Steps ahead leave out who depends on results, however few others there are (a `change`)."""
    engine.scheduler.policy.others_per_absent = 0


def draft_anew(engine, **how):
    """Have another speculator than the configuration says, before requests come (a `change`)."""
    given = {"model": engine.draft_model} | how
    names = engine.config.drafters
    engine.scheduler.speculator = DraftSpeculator(names, engine.run_ahead, **given)


def dictate_drafts(engine, dictate):
    """Have all drafts of requests that have some said by a function, whether they pay or not."""
    engine.scheduler.speculator = FixedSpeculator(dictate)


def run(
    model,
    requests,
    tp=1,
    preempt_every=0,
    change=None,
    each_step=None,
    ahead=None,
    look=True,
    waves=(),
    local_size=None,
    timeout=240.0,
    world=None,
    runners=None,
    **settings,
) -> Run:
    """Run `requests` together at a tensor-parallel size; `change(engine)` runs before them.

    `each_step(engine, step)` runs after every step on rank 0. `ahead`: steps overlap, as on a GPU.
    Not `look`: nobody sees the logits, as when serving. `waves`: more requests, each wave when
    the one before is done, or a function of the engine that is called then. `local_size`: so many
    ranks pretend to share a host. `timeout`: seconds of the whole run of several. `world`: that of
    this rank, where all ranks call this, in place of `tp`; those above 0 get None. `runners`: a
    list with the runner of this rank's earlier run, which is used again; an empty one gets it.
    The engine has no drafters unless the settings say so, and room for as many sequences as these.
    """
    together = sum(request.params.n for request in requests)
    given = {"kv_pages": 64, "drafts": "off", "max_num_seqs": max(16, together)} | settings
    config = EngineConfig.from_values(model=str(model), **given)

    def one_rank(world, close=False):
        result = Run()
        names = {}

        def tap(row, position, logits):
            for offset, values in enumerate(logits):
                key = (names[row.admission], row.choice, position + offset)
                known = result.logits.setdefault(key, values.clone())
                if known is not values and not torch.equal(known, values) and change is None:
                    raise AssertionError(f"{key} was computed again with other bits")

        looked = tap if look and world.rank == 0 else None
        runner = runners[0] if runners else None
        if runner is not None:
            runner.reset_pages(config.kv_pages)
        engine = Engine(config, world, looked, preempt_every, runner, ahead)
        if runners == []:
            runners.append(engine.runner)
        if change is not None:
            change(engine)
        if world.rank > 0:
            engine.worker_loop()
            if close:
                engine.runner.close()
            return None
        result.fingerprint = engine.system_fingerprint
        for wave in (requests, *waves):
            if callable(wave):
                wave(engine)
                continue
            before = engine.statistics().totals.prefix_hit_tokens
            for request in wave:
                names[len(names)] = request.request_id
                result.outputs[request.request_id] = []
                result.seeds[request.request_id] = engine.submit(request)
            while engine.has_work:
                for output in engine.step():
                    result.outputs[output.request_id].append(output)
                if each_step is not None:
                    each_step(engine, engine.statistics().steps)
            engine.heartbeat()
            engine.check_integrity()
            result.hits.append(engine.statistics().totals.prefix_hit_tokens - before)
        result.steps = engine.statistics().steps
        result.preemptions = engine.statistics().preemptions
        engine.stop_workers()
        if close:
            engine.runner.close()  # NCCL waits for the last graph when the world closes
        return result

    if world is not None:
        return one_rank(world, close=True)
    if tp == 1:
        return one_rank(SoloWorld())
    return run_threads(tp, one_rank, timeout, local_size)[0]
