"""The circumstances that must not change a bit: one list, for the CPU and for GPUs.

A few *probes* (fixed prompts, greedy and sampled) run in each circumstance. The logits of the whole
vocabulary at every position of every probe, and its tokens, must equal those of the first
circumstance at tensor-parallel size 1.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpdet.kernels.order import PAGE_TOKENS
from tpdet.requests.request import Request, SamplingParams
from tpdet.tools.verify.drafted import HALF, KINDS, MODELS, NGRAMS
from tpdet.tools.verify.relations import EAGER
from tpdet.tools.verify.spec import VerifySpec

NEIGHBOUR_TOKENS = 90  # prompt tokens of a neighbour, at most
_CROWD = 4  # requests that run together where their number does not matter
_SPARE_PAGES = 8
REPEATING = "repeating texts"
_REPEATED_PROMPT, _LEAST_REPEATED = 48, 24  # tokens


@dataclass(frozen=True)
class Circumstance:
    """How the probes are run.

    `batch` requests run together (probes and random neighbours), with `budget` tokens in a step.
    Every `preempt_every` steps each running sequence is preempted. `prefill` gives a probe's answer
    back as a prompt, so that decoded positions are computed by prefill. `drafts`: the kind of those
    that the rows of all requests carry (`drafted.KINDS`), or who makes them (`drafted.OF_ENGINE`),
    "" for none. `spoiled`: whatever lies behind a wrong draft is NaN. `texts`: which probes. Not
    `scored`: the probes' prompts have no log-probabilities, so only their answers are compared.
    `cached`: each probe comes behind one of the same prompt, whose pages it reads.
    """

    name: str
    batch: int = 1
    budget: int = 2048
    preempt_every: int = 0
    prefill: bool = False
    drafts: str = ""
    spoiled: bool = False
    texts: str = ""
    scored: bool = True
    cached: bool = False


def kv_pages(spec: VerifySpec) -> int:
    """KV pages for the largest batch, and some that stay free."""
    neighbours = max(spec.batches) * -(-(NEIGHBOUR_TOKENS + spec.tokens) // PAGE_TOKENS)
    probes = sum(-(-(length + spec.tokens) // PAGE_TOKENS) for length in spec.prompt_lengths)
    return _SPARE_PAGES + neighbours + probes


def circumstances(spec: VerifySpec) -> list[Circumstance]:
    """The circumstances of one world's steps; the first is the reference."""
    room = sum(spec.prompt_lengths) + _CROWD * NEIGHBOUR_TOKENS  # for every prompt in one step
    again = max(Circumstance.budget, room)  # a preempted sequence must get further than before
    by_relation = {
        "alone": [Circumstance("alone")],
        "batch": [Circumstance(f"batch {n}", batch=n) for n in spec.batches if n > 1],
        "chunks": [Circumstance(f"chunks of {n}", batch=_CROWD, budget=n) for n in spec.budgets],
        "whole": [Circumstance("not chunked", batch=_CROWD, budget=room)],
        "preempted": [Circumstance("preempted", batch=_CROWD, budget=again, preempt_every=3)],
        "prefixes": [Circumstance("prefix hits", cached=True)],
        "prefill": [Circumstance("prefill of decode", prefill=True)],
        "unscored": [
            Circumstance("prompts not scored", batch=_CROWD, budget=room, scored=False),
            *(
                Circumstance(f"not scored, chunks of {n}", batch=_CROWD, budget=n, scored=False)
                for n in spec.budgets
            ),
        ],
        "drafts": [*_drafted(spec, again)],
        "ngrams": [
            Circumstance(REPEATING, texts=REPEATING),
            Circumstance("n-gram drafts", batch=_CROWD, drafts=NGRAMS, texts=REPEATING),
        ],
        "draft_model": [
            Circumstance(f"drafts of {model}", batch=_CROWD, drafts=model) for model in MODELS
        ],
    }
    return [one for name, some in by_relation.items() if name in spec.relations for one in some]


def _drafted(spec: VerifySpec, again: int) -> Iterator[Circumstance]:
    """Every kind of drafts, and the half right ones however steps are made.

    again: tokens of a step in which a preempted sequence gets further than before.
    """
    for kind in KINDS:
        yield Circumstance(f"{kind} drafts", batch=_CROWD, drafts=kind)
    name = f"{HALF} drafts"
    for n in spec.batches:
        yield Circumstance(f"{name}, batch {n}", batch=n, drafts=HALF)
    for n in spec.budgets:
        yield Circumstance(f"{name}, chunks of {n}", batch=_CROWD, budget=n, drafts=HALF)
    yield Circumstance(f"{name}, preempted", _CROWD, again, preempt_every=3, drafts=HALF)
    yield Circumstance(f"{name}, NaN behind wrong ones", _CROWD, drafts=HALF, spoiled=True)


def drafted_without_graphs() -> Circumstance:
    """The circumstance of drafts in a process without graphs."""
    return Circumstance(f"{HALF} drafts, {EAGER}", batch=_CROWD, drafts=HALF)


def in_other_processes(name: str) -> Circumstance:
    """The circumstance of probes in other processes, whose steps do not differ."""
    return Circumstance(name, batch=_CROWD)


def probes(vocab_size: int, lengths: tuple[int, ...], tokens: int, seed: int) -> list[Request]:
    """One request for each prompt length: the first greedy, the others sampled in several ways."""
    draw = random.Random(seed)
    ways: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 11},
        {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.1, "seed": 12},
        {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.3, "seed": 13},
    )
    return [
        _probe(
            str(index),
            [draw.randrange(vocab_size) for _ in range(length)],
            max_tokens=tokens,
            prompt_logprobs=0,
            **ways[index % len(ways)],
        )
        for index, length in enumerate(lengths)
    ]


def _probe(name: str, ids: Iterable[int], **sampling: Any) -> Request:
    params = SamplingParams(ignore_eos=True, logprobs=1, **sampling)
    return Request(request_id=f"probe-{name}", prompt_token_ids=tuple(ids), params=params)


def repeating_probes(vocab_size: int, tokens: int, seed: int) -> list[Request]:
    """Probes for whose answers n-grams are found: always right, right at times, and as it comes.

    Biases see to that: an answer is one id, or two ids of which a penalty makes both come, and
    noise in no order that a model could keep.
    """
    draw = random.Random(f"{seed} {REPEATING}")
    one, two, *others = draw.sample(range(vocab_size), 8)
    most = max(tokens, _LEAST_REPEATED)
    both = {one: 100.0, two: 100.0}
    ways: tuple[tuple[Sequence[int], dict[str, Any]], ...] = (
        ((one,), {"temperature": 0.0, "logit_bias": {one: 100.0}}),
        ((one,), {"temperature": 1.0, "logit_bias": both, "frequency_penalty": 2.0, "seed": 20}),
        (others, {"temperature": 1.0, "top_k": 40, "seed": 21}),
    )
    return [
        _probe(
            f"repeating-{index}", [*ids] * (_REPEATED_PROMPT // len(ids)), max_tokens=most, **way
        )
        for index, (ids, way) in enumerate(ways)
    ]


def neighbours(vocab_size: int, count: int, tokens: int, seed: int) -> list[Request]:
    """Random requests that share the probes' steps."""
    draw = random.Random(seed)
    return [
        Request(
            request_id=f"neighbour-{seed}-{index}",
            prompt_token_ids=tuple(
                draw.randrange(vocab_size) for _ in range(draw.randint(3, NEIGHBOUR_TOKENS))
            ),
            params=SamplingParams(
                temperature=1.0, seed=draw.randrange(2**31), max_tokens=draw.randint(1, tokens)
            ),
        )
        for index in range(count)
    ]
