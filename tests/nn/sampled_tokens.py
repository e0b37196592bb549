"""Tokens that an engine samples in rough company, and their log-probabilities by `tpdet.nn`."""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

import tpdet.nn
from tests.lib.engine_harness import ask, dictate_drafts, run
from tests.lib.thread_world import run_threads
from tpdet.comm.world.world import SoloWorld, World
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.requests.request import Request, TokenOutput

_STEP_TOKENS = 96
TIMEOUT = 3000.0
_PREFIX = 280  # over a page, so that it is shared
_VOCABULARY = 1100
_FOREIGN = "foreign"


@dataclass
class SampledTokens:
    """Sequences that an engine sampled, and what their tokens met."""

    prompts: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    bits: list[list[int]] = field(default_factory=list)
    """Each output token's log-probability, its 32 bits as an integer."""
    met: dict[str, int] = field(default_factory=dict)
    """Counted: steps beside foreign requests, prefix tokens read, preemptions, (accepted) drafts,
    chunks that end within a prompt."""

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(map(len, self.outputs))

    def check_met(self) -> None:
        """Raises ValueError naming what the tokens should have met and did not."""
        missing = [name for name, times in self.met.items() if not times]
        if missing:
            raise ValueError(f"the tokens met no {', '.join(missing)}: sample more of them")


def on_ranks(
    ranks: int, function: Callable[[World], Any], processes: World | None, kind: object
) -> Any:
    """What `function(world)` returns on rank 0, of `ranks` ranks, a value of type `kind`.

    processes: the world of this process, whose ranks all call this and get the value; one of them
    or all compute. None for threads.
    """
    if processes is None:
        return function(SoloWorld()) if ranks == 1 else run_threads(ranks, function, TIMEOUT)[0]
    value = None
    if processes.rank < ranks:
        value = function(SoloWorld() if ranks == 1 else processes)
    processes.set_timeout(TIMEOUT)  # an engine's own was shorter
    return msgspec.json.decode(processes.broadcast_bytes(msgspec.json.encode(value)), type=kind)


def bits_of(value: float) -> int:
    """The bits of an fp32 number."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def sample_tokens(
    model: Path,
    ranks: int,
    count: int,
    answers: SampledTokens | None = None,
    of_wave: int = 8,
    seed: int = 0,
    processes: World | None = None,
) -> SampledTokens:
    """Sample `count` tokens of each request of two waves, which meet what `met` counts.

    Drafts are dictated, by `answers` to the same requests (None: any tokens), often wrong ones.
    processes: as for `on_ranks`.
    """
    draw = random.Random(seed)
    waves = [_wave(draw, count, range(first, first + of_wave)) for first in (0, of_wave)]
    met = dict.fromkeys(("foreign steps", "chunks"), 0)

    def propose(sequence, most):
        length = min(most, draw.randrange(1, 5))
        if answers is None:
            return [draw.randrange(_VOCABULARY) for _ in range(length)]
        position = len(sequence.tokens) - sequence.prompt_length
        drafts = answers.outputs[int(sequence.request_id)][position : position + length]
        return [*drafts[:-1], 0] if draw.random() < 0.5 else drafts

    def watch(engine, step):
        running = engine.scheduler.policy.running
        own = [it for it in running if not it.request_id.startswith(_FOREIGN)]
        met["foreign steps"] += 0 < len(own) < len(running)
        # Of a prompt whose last page was read from the cache, nothing is computed yet.
        met["chunks"] += sum(
            it.computed < it.prompt_length for it in own if it.computed % PAGE_TOKENS
        )
        totals = engine.statistics().totals
        met["drafts"], met["accepted drafts"] = totals.draft_tokens, totals.accepted_draft_tokens

    def sample(world):
        result = run(
            model,
            waves[0],
            preempt_every=of_wave,
            change=lambda engine: dictate_drafts(engine, propose),
            each_step=watch,
            look=False,
            waves=waves[1:],
            world=world,
            max_num_batched_tokens=_STEP_TOKENS,
            max_num_seqs=of_wave - 2,
            kv_pages=5 * of_wave,
        )
        if result is None:
            return None
        sampled = SampledTokens(met=met)
        own = [it for it in chain(*waves) if not it.request_id.startswith(_FOREIGN)]
        for request in own:
            tokens = [o for o in result.outputs[request.request_id] if isinstance(o, TokenOutput)]
            sampled.prompts.append(request.prompt_token_ids)
            sampled.outputs.append([token.token_id for token in tokens])
            sampled.bits.append([bits_of(token.logprob) for token in tokens])
        met["prefix tokens"] = sum(result.cached(request.request_id) for request in own)
        met["preemptions"] = result.preemptions
        return sampled

    return on_ranks(ranks, sample, processes, SampledTokens)


def _wave(draw: random.Random, count: int, numbers: range) -> list[Request]:
    """A request of each number, and others between them, which nobody scores.

    Half of them begin alike, over a page long; two thirds have drafts.
    """
    prefix = _drawn(random.Random(0), _PREFIX)
    requests = []
    for number in numbers:
        tail = _drawn(draw, 3 + 11 * (number % 8))
        seed = draw.randrange(1 << 32)
        how = {"temperature": 1.0, "seed": seed, "logprobs": 0, "max_tokens": count}
        prompt = prefix + tail if number % 2 else tail
        requests.append(ask(str(number), prompt, drafts=((0,),) if number % 3 else (), **how))
        if number % 4 == 0:
            how |= {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5}
            requests.append(ask(f"{_FOREIGN} {number}", _drawn(draw, 50), **how))
    return requests


def _drawn(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(_VOCABULARY) for _ in range(length)]


def recomputed_bits(
    load: Callable[[World], Any],
    sampled: SampledTokens,
    ranks: int,
    together: int = 5,
    processes: World | None = None,
) -> list[list[int]]:
    """Bits of the same tokens by a model over `ranks` ranks; `load(world)` makes it.

    together: sequences of a packed batch. processes: as for `on_ranks`.
    """

    def one_rank(world):
        model, results = load(world), []
        sequences = [
            [*prompt, *output]
            for prompt, output in zip(sampled.prompts, sampled.outputs, strict=True)
        ]
        for first in range(0, len(sequences), together):
            batch = sequences[first : first + together]
            lengths = [len(ids) for ids in batch]
            with torch.no_grad():
                scores = model.log_prob([*chain.from_iterable(batch)], lengths)
            parts = scores.split([length - 1 for length in lengths])
            outputs = sampled.outputs[first : first + together]
            for part, output in zip(parts, outputs, strict=True):
                results.append(part[len(part) - len(output) :].view(torch.int32).tolist())
        assert len({*world.gather_bytes(msgspec.json.encode(results))}) == 1, "ranks differ"
        return results

    return on_ranks(ranks, one_rank, processes, list[list[int]])


def mismatches(ours: list[list[int]], theirs: list[list[int]]) -> int:
    """Tokens whose log-probabilities have other bits."""
    return sum(
        one != other
        for left, right in zip(ours, theirs, strict=True)
        for one, other in zip(left, right, strict=True)
    )


def loader(model: Path, **settings):
    """What `recomputed_bits` loads, on a GPU where there is one."""
    return lambda world: tpdet.nn.load(model, world, **settings)
