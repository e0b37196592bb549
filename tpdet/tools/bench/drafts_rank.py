"""One rank that times drafters, for `tpdet bench drafts`."""

import random
import time
from collections import abc
from typing import Any

import msgspec

from tpdet.llm.llm import LLM
from tpdet.llm.results import RequestOutput
from tpdet.requests.request import SamplingParams
from tpdet.scheduler.sequence import Sequence
from tpdet.scheduler.speculator import DraftCounts
from tpdet.speculative.draft_model.model import DraftModel
from tpdet.speculative.proposers.proposer import BatchProposer
from tpdet.speculative.speculator import DraftSpeculator
from tpdet.tools.bench.draft_texts import TEXTS, Text
from tpdet.tools.bench.engine import engine_row
from tpdet.tools.bench.load import prompt
from tpdet.tools.bench.spec import BenchResult, DraftsSpec, result_of
from tpdet.tools.bench.step_ends import StepEnds
from tpdet.tools.measurement.rows import BenchRow

Generate = abc.Callable[[], list[RequestOutput]]
_MATCH_LENGTH = 64


class Synthetic:
    """A drafter that knows the answer, and says each of its tokens with a given chance."""

    name = "synthetic"
    is_spent = False

    def __init__(self, answer: abc.Sequence[int], first: int, chance: float, draw: random.Random):
        """first: where the output begins. draw: decides which tokens are said wrongly."""
        self._answer, self._first, self._chance, self._draw = answer, first, chance, draw
        self._position = 0

    def match(self, tokens: abc.Sequence[int], end: int) -> int:
        """A fixed length, until the answer's end."""
        self._position = end - self._first
        return _MATCH_LENGTH if self._position < len(self._answer) else 0

    def propose(self, most: int) -> list[int]:
        """What follows, with a neighbouring id in place of some tokens."""
        ids = self._answer[self._position : self._position + most]
        return [id_ if self._draw.random() < self._chance else id_ ^ 1 for id_ in ids]


def measure(spec: DraftsSpec) -> BenchResult | None:
    """One rank: run every case on all ranks; the result on rank 0."""
    settings = {"skip_tokenizer_init": not spec.texts} | spec.settings
    with LLM(**settings) as llm:
        rows = [row for batch in spec.batches for row in synthetic_rows(llm, spec, batch)]
        rows += text_rows(llm, spec) if spec.texts else []
        engine = llm.engine
        device = engine.runner.device.type
        return result_of(rows, device, engine.world.size) if llm.rank == 0 else None


def synthetic_rows(llm: LLM, spec: DraftsSpec, batch: int) -> list[BenchRow]:
    """Random prompts, sampled answers, and a drafter of each share of right tokens.

    A draft model is that drafter where there is one: it computes its drafts, and others are taken.
    A last row then has its own.
    """
    vocabulary = llm.engine.model_config.vocab_size
    prompts = [
        list(prompt(spec.context, vocabulary, f"{spec.seed}-{batch}-{i}")) for i in range(batch)
    ]
    params = SamplingParams(
        temperature=1.0, seed=spec.seed, max_tokens=spec.tokens, ignore_eos=True, detokenize=False
    )

    def generate() -> list[RequestOutput]:
        return llm.generate(prompts, params, use_tqdm=False)

    known = measured(llm, generate, spec.repeats, paused=True, batch=batch)
    answers = {
        tuple(ids): answer.outputs[0].token_ids
        for ids, answer in zip(prompts, known.answers, strict=False)
    }
    rows, has_model = [], llm.engine.config.draft_model is not None
    for share in (*spec.acceptance, *([None] if has_model else [])):
        draw = random.Random(f"{spec.seed}-{share}")

        def drafter(
            choice: Sequence, share: float | None = share, draw: random.Random = draw
        ) -> Synthetic:
            answer = answers[choice.request.prompt_token_ids]
            return Synthetic(answer, choice.prompt_length, share or 0.0, draw)

        name = "draft model" if has_model else "synthetic drafts"
        if share is not None:
            name += f", {share:g} right"
        _draft_anew(llm, None if share is None else drafter)
        found = measured(llm, generate, spec.repeats, batch=batch)
        after = measured(llm, generate, 1, paused=True, batch=batch)
        rows += beside(llm, name, batch, spec.context, known, found, after)
    return rows


class _Replaced:
    """A draft model that computes its drafts, and says those of synthetic drafters."""

    def __init__(self, model: DraftModel, drafter: abc.Callable[[Sequence], Synthetic]) -> None:
        self.times, self.captures = model.times, model.captures
        self.lags, self.forget = model.lags, model.forget
        self._model, self._drafter = model, drafter

    def draft(self, requests: abc.Sequence[tuple[Sequence, int]]) -> list[list[int]]:
        """As `DraftModel.draft`."""
        return self._model.draft(requests, self._say)

    def _say(self, choice: Sequence, drafts: list[int]) -> list[int]:
        synthetic = self._drafter(choice)
        synthetic.match((), len(choice.tokens))
        return [*synthetic.propose(len(drafts)), *drafts][: len(drafts)]


def _draft_anew(llm: LLM, drafter: abc.Callable[[Sequence], Synthetic] | None) -> None:
    """Nothing was seen of drafts yet, only what steps take. drafter: there are synthetic ones, or
    what they say in place of the draft model's drafts.
    """
    engine, model, first = llm.engine, llm.engine.draft_model, None
    proposer: BatchProposer | None = model
    if model is not None and drafter is not None:
        proposer = _Replaced(model, drafter)
    elif engine.config.draft_model is None:
        first = drafter
    before = engine.scheduler.speculator
    times = before.times if isinstance(before, DraftSpeculator) else None
    engine.scheduler.speculator = DraftSpeculator(
        engine.config.drafters, engine.run_ahead, model=proposer, times=times, first=first
    )


def text_rows(llm: LLM, spec: DraftsSpec) -> list[BenchRow]:
    """Texts of each kind, one request after the other, greedy."""
    rows = []
    for kind, texts in TEXTS.items():

        def generate(texts: abc.Sequence[Text] = texts) -> list[RequestOutput]:
            return [answer for text in texts for answer in _ask(llm, text, spec.tokens)]

        known = measured(llm, generate, spec.repeats, paused=True)
        found = measured(llm, generate, spec.repeats)
        after = measured(llm, generate, 1, paused=True)
        rows += beside(llm, kind, 1, None, known, found, after)
    return rows


def _ask(llm: LLM, text: Text, tokens: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, json_schema=text.schema, logprobs=0)
    if text.beginning:
        return llm.generate([text.beginning], params, use_tqdm=False)
    message = {"role": "user", "content": text.question}
    return llm.chat([message], params, use_tqdm=False)


class Measured(msgspec.Struct, frozen=True):
    """Some runs: the seconds of each; `tokens`, `steps` and `drafters` are those of the last.

    `steady`: tokens a second while all sequences decode, in the best of the runs; None if that was
    too short to tell.
    """

    answers: list[Any]
    calls: list[float]
    steps: int
    drafters: dict[str, DraftCounts]
    steady: float | None

    @property
    def seconds(self) -> float:
        """Seconds of the fastest run."""
        return min(self.calls)

    @property
    def tokens(self) -> int:
        """Tokens that were generated."""
        return sum(len(answer.outputs[0].token_ids) for answer in self.answers)


def measured(
    llm: LLM, generate: Generate, repeats: int, paused: bool = False, batch: int = 1
) -> Measured:
    """Run the requests, `batch` of them together, so many times; paused: without drafts."""
    engine, calls, steady = llm.engine, [], []
    speculator, ends = engine.scheduler.speculator, StepEnds(engine)
    speculator.paused = paused
    for _ in range(repeats):
        engine.scheduler.forget_prefixes()
        speculator.counts = {}
        ends.clear()
        before, begin = engine.statistics().steps, time.perf_counter()
        answers = generate()
        calls.append(time.perf_counter() - begin)
        if (rate := ends.steady(batch)) is not None:
            steady.append(rate)
    speculator.paused = False
    ends.close()
    steps = engine.statistics().steps - before
    return Measured(answers, calls, steps, speculator.counts, max(steady, default=None))


def beside(
    llm: LLM,
    case: str,
    batch: int,
    context: int | None,
    known: Measured,
    found: Measured,
    after: Measured,
) -> list[BenchRow]:
    """Steps and tokens/s beside those without drafts.

    known, after: without drafts, before all drafts and after these; a GPU is not always as fast.
    Raises RuntimeError where an answer differs.
    """
    if not bits(known) == bits(found) == bits(after):
        raise RuntimeError(f"{case}, batch {batch}: an answer with drafts has other bits")
    rates = [each.tokens / each.seconds for each in (known, found)]
    counts = {name: msgspec.to_builtins(it) for name, it in found.drafters.items()}
    drafted = sum(it.draft_tokens for it in found.drafters.values())
    right = sum(it.accepted_tokens for it in found.drafters.values())
    metrics = {
        "tokens": found.tokens,
        "times_as_fast": [known.seconds / seconds for seconds in found.calls],
        "without_drafts_after": known.seconds / after.seconds,
        "acceptance": right / drafted if drafted else None,
        "drafters": counts,
    }
    if llm.engine.draft_model is not None:
        metrics["draft_step_ms"] = 1e3 * llm.engine.draft_model.times.seconds(batch)
    common = {"batch": batch, "context": context, "peer": "without drafts"}
    steps = engine_row(
        llm.engine,
        case=case,
        value=found.steps,
        unit="steps",
        peer_value=known.steps,
        ratio=found.steps / known.steps,
        metrics=metrics,
        **common,
    )
    pairs = [(f"{case}, speed", rates[0], rates[1])]
    if known.steady is not None and found.steady is not None:
        pairs.append((f"{case}, speed while all decode", known.steady, found.steady))
    speeds = [
        engine_row(
            llm.engine,
            case=name,
            value=rate,
            unit="tokens/s",
            peer_value=peer,
            ratio=peer / rate if rate else None,
            **common,
        )
        for name, peer, rate in pairs
    ]
    return [steps, *speeds]


def bits(found: Measured) -> list[tuple[object, ...]]:
    """What must be equal of every answer."""
    first = [answer.outputs[0] for answer in found.answers]
    return [(tuple(it.token_ids), it.text, tuple(it.logprob_bits)) for it in first]
