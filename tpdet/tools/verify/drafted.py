"""Drafts of every kind for probes whose answers are known; see docs/speculative.md.

A draft model is the model itself, which is right, or another one, which is not.
"""

import gc
import random
from collections import abc

import msgspec
import torch

from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import free_gpu_bytes, resolve_device
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.control.plan import PlanRows, StepPlan
from tpdet.engine.fault_points import FaultPoints
from tpdet.requests.request import Request
from tpdet.runner import LogitBlock, Runner, TakeLogits
from tpdet.scheduler.sequence import Sequence
from tpdet.scheduler.speculator import DraftCounts, Speculator
from tpdet.speculative.acceptance import AcceptanceRates
from tpdet.speculative.draft_model.model import DraftModel
from tpdet.speculative.draft_model.start import held_bytes
from tpdet.speculative.fixed import Dictate
from tpdet.speculative.proposers.proposer import DRAFT_MODEL, NGRAM
from tpdet.speculative.speculator import DraftSpeculator
from tpdet.tools.verify.spec import Drafted, VerifySpec

RIGHT, HALF, WRONG, RANDOM = "right", "half right", "wrong", "random"
KINDS = RIGHT, HALF, WRONG, RANDOM
"""What drafts may be. Half right: up to a place that varies; wrong: at every position."""
NGRAMS, ITSELF, OTHER = "n-grams", "the model itself", "another model"
MODELS = ITSELF, OTHER
OF_ENGINE = NGRAMS, *MODELS
"""Whose drafts come from the engine's own drafters."""
MOST = 15  # drafts of a row: with its last token as many rows as kernels attend together
_BESIDE = 4 << 30  # bytes of a GPU that a draft model takes beside weights and pages
Tokens = abc.Mapping[str, tuple[int, ...]]
"""By the name of a probe."""


def with_drafts(request: Request) -> Request:
    """The request, which the engine's drafter may draft for."""
    return msgspec.structs.replace(request, drafts=((0,),) * request.params.n)


def drafter(kind: str, answers: Tokens, vocabulary: int, seed: int) -> Dictate:
    """Drafts of a kind. Requests without a known answer get random ones."""
    draw = random.Random(f"{seed} {kind}")

    def propose(sequence: Sequence, most: int) -> list[int]:
        length = min(most, draw.randint(1, MOST))
        answer = answers.get(sequence.request_id)
        if kind == RANDOM or answer is None:
            return [draw.randrange(vocabulary) for _ in range(length)]
        output = len(sequence.tokens) - sequence.prompt_length
        known = list(answer[output : output + length])
        right = {RIGHT: len(known), HALF: draw.randint(0, len(known)), WRONG: 0}[kind]
        return known[:right] + [(token + 1) % vocabulary for token in known[right:]]

    return propose


def speculator_of_engine(
    config: EngineConfig, runner: Runner, model: DraftModel | None
) -> Speculator:
    """The engine's proposers, which draft by what is assumed of times, whatever steps take here."""

    def clock() -> float:
        return 1.0

    if model is not None:
        model.times.clock = clock
    runs_ahead = runner.device.type == "cuda"
    rates = AcceptanceRates(proof=0)  # wrong drafts of a draft model are to be verified, too
    return DraftSpeculator(config.drafters, runs_ahead, clock, model, rates)


def with_draft_model(kind: str, spec: VerifySpec, config: EngineConfig) -> EngineConfig:
    """`config` with a draft model of a kind. Another model than itself is the one that was given.

    If none was, it is one of the same shape with random weights of another seed.
    """
    named = spec.draft_model if kind == OTHER else None
    changes: dict[str, object] = {"drafts": "auto", "skip_tokenizer_init": named is None}
    changes["draft_model"] = str(resolve_model(named or spec.model))
    if kind == OTHER and named is None:
        changes |= {"load_format": "dummy", "seed": config.seed + 1}
    return config.model_copy(update=changes)


def why_no_room(config: EngineConfig, world: World) -> str | None:
    """Why rank 0 has no room for a whole draft model; None if it has. Collective."""
    reason: str | None = None
    if world.rank == 0 and resolve_device(config.device) == "cuda":
        assert config.draft_model is not None and config.kv_pages is not None
        model = load_model_config(resolve_model(config.draft_model), config.dtype)
        needed = held_bytes(model, config.kv_pages) + _BESIDE
        gc.collect()  # the draft model before it, which its engine holds
        torch.cuda.empty_cache()
        free = free_gpu_bytes(config.gpu_memory_utilization)
        if needed > free:
            reason = (
                f"a draft model of {needed / 2**30:.1f} GiB: rank 0's GPU has {free / 2**30:.1f} "
                "GiB left; name a smaller one with --draft-model"
            )
    return msgspec.json.decode(world.broadcast_bytes(msgspec.json.encode(reason)), type=str | None)


def counted(kind: str, drafters: abc.Mapping[str, DraftCounts], own: bool) -> Drafted:
    """Drafts of a kind of `OF_ENGINE`, of which some must be accepted or rejected.

    own: whether the other model is that of `tpdet verify`, which is mostly wrong.
    """
    counts = drafters.get(NGRAM if kind == NGRAMS else DRAFT_MODEL, DraftCounts())
    return Drafted(
        drafts=counts.draft_tokens,
        accepted=counts.accepted_tokens,
        some_right=kind != OTHER,
        some_wrong=kind == NGRAMS or (kind == OTHER and own),
    )


class NanBehindWrongDrafts(FaultPoints):
    """Makes every logit behind a wrong draft of a probe NaN; on rank 0."""

    def __init__(self, names: abc.Mapping[int, str], tokens: Tokens) -> None:
        """names: of the probes by admission; tokens: of each, prompt and answer."""
        super().__init__((), 0)
        self._names, self._tokens = names, tokens

    def meet(self, plan: StepPlan, results: TakeLogits) -> tuple[StepPlan, TakeLogits]:
        """The plan, and results that see NaN."""
        return plan, _Spoiled(results, refused_logits(plan.rows, self._names, self._tokens))


def refused_logits(rows: PlanRows, names: abc.Mapping[int, str], tokens: Tokens) -> list[int]:
    """Which of a step's logits lie behind a wrong draft of a probe; its row's place is known."""
    refused: list[int] = []
    first = 0
    for row in rows:
        known = tokens.get(names.get(row.admission, ""), ())
        if row.samples > 1 and known and not row.unverified:
            ids = row.token_ids if row.token_ids[0] >= 0 else (known[row.start], *row.token_ids[1:])
            right = count_right(row.start, ids, known)
            refused += range(first + right, first + row.logits)
        first += row.logits
    return refused


def count_right(start: int, ids: abc.Sequence[int], known: abc.Sequence[int]) -> int:
    """How many of the first `ids`, which stand at `start` and on, are the known tokens there."""
    expected = known[start : start + len(ids)]
    return next(
        (i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), len(expected)
    )


class _Spoiled:
    """Results of a step, some of whose logits are NaN."""

    def __init__(self, results: TakeLogits, refused: list[int]) -> None:
        self._results, self._refused = results, refused

    def take(self, block: LogitBlock) -> torch.Tensor:
        """As TakeLogits."""
        rows = [row - block.first for row in self._refused]
        if rows := [row for row in rows if 0 <= row < len(block.logits)]:
            block = block._replace(logits=block.logits.clone())
            block.logits[rows] = torch.nan
        return self._results.take(block)
