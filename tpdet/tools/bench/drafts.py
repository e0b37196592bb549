"""`tpdet bench drafts`: steps and tokens/s with drafters, beside those without."""

import argparse
import random
import time
from collections import abc
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from tpdet.checkpoint.model_config.known_shapes import is_shape
from tpdet.config import EngineConfig
from tpdet.errors import UsageError
from tpdet.llm.llm import LLM
from tpdet.llm.results import RequestOutput
from tpdet.requests.request import SamplingParams
from tpdet.scheduler.sequence import Sequence
from tpdet.scheduler.speculator import DraftCounts
from tpdet.speculative.draft_model.model import DraftModel
from tpdet.speculative.proposers.proposer import DRAFT_MODEL, BatchProposer
from tpdet.speculative.speculator import DraftSpeculator
from tpdet.tools.bench.draft_texts import TEXTS, Text
from tpdet.tools.bench.engine import engine_of, engine_row
from tpdet.tools.bench.load import StepEnds, prompt
from tpdet.tools.bench.run import run_worlds
from tpdet.tools.bench.spec import BenchResult, DraftsSpec, result_of
from tpdet.tools.measurement.rows import BenchRow, finish
from tpdet.tools.worlds.lists import parse_sizes

Generate = abc.Callable[[], list[RequestOutput]]
_MATCH_LENGTH = 64


def drafts_command(options: argparse.Namespace) -> int:
    """A world a size; each row stands beside the same requests without drafts."""
    with engine_of(options) as config:
        rows, largest = _measure(options, config)
    console = Console()
    for row in rows:
        for line in drafter_lines(row):
            console.print(line, highlight=False, soft_wrap=True)
    return finish("drafts", largest.machine, rows, options.output, as_json=options.json)


def _measure(
    options: argparse.Namespace, config: EngineConfig
) -> tuple[list[BenchRow], BenchResult]:
    """The rows of all sizes, and the result of the largest."""
    if not config.drafters:
        raise UsageError("bench drafts measures drafters, and there are none: leave drafts auto")
    of_texts, name = options.cases != "synthetic", options.model
    if of_texts and name is not None and is_shape(name):
        raise UsageError(f"model {name!r} is a shape without a tokenizer: add --cases synthetic")
    spec = DraftsSpec(
        settings=config.model_dump(exclude_unset=True),
        batches=parse_sizes(options.batch) if options.cases != "text" else (),
        acceptance=parse_shares(options.acceptance),
        context=options.context,
        tokens=options.generate,
        texts=of_texts,
        repeats=options.repeats,
        seed=options.seed,
    )
    return run_worlds(parse_sizes(options.tp), spec, config)


def drafter_lines(row: BenchRow) -> abc.Iterator[str]:
    """Say which share of each drafter's drafts was right, and the time of a draft model's step.

    What is measured without drafts before and after them may differ by more than a hundredth.
    """
    if row.metrics is None:
        return
    case = f"TP {row.tp}, batch {row.batch}, {row.case}:"
    for name, counts in row.metrics["drafters"].items():
        drafted, right = counts["draft_tokens"], counts["accepted_tokens"]
        if drafted:
            share = f"{right / drafted:.0%}"
            yield f"{case} {right} of {drafted} drafts of {name} were right ({share})"
    if seconds := row.metrics.get("draft_step_ms"):
        yield f"{case} a step of {DRAFT_MODEL} takes {seconds:.2f} ms"
    after = row.metrics["without_drafts_after"]
    if abs(after - 1.0) > 0.01:
        yield f"{case} without drafts it was {after:.2f} times as fast afterwards as at first"


def parse_shares(text: str) -> tuple[float, ...]:
    """A list such as 0.5,0.8 as numbers from 0 to 1. Raises UsageError."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = (-1.0,)
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise UsageError(f"--acceptance {text!r} is no list of shares such as 0.5,0.8")
    return shares


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

    plain = measured(llm, generate, spec.repeats, paused=True, batch=batch)
    answers = {
        tuple(ids): answer.outputs[0].token_ids
        for ids, answer in zip(prompts, plain.answers, strict=False)
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
        drafted = measured(llm, generate, spec.repeats, batch=batch)
        after = measured(llm, generate, 1, paused=True, batch=batch)
        case = {"batch": batch, "context": spec.context}
        rows += beside(llm, name, case, DraftedRuns(plain, drafted, after))
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

        plain = measured(llm, generate, spec.repeats, paused=True)
        drafted = measured(llm, generate, spec.repeats)
        after = measured(llm, generate, 1, paused=True)
        rows += beside(llm, kind, {"batch": 1}, DraftedRuns(plain, drafted, after))
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

    @property
    def rate(self) -> float:
        """Tokens a second of the fastest run."""
        return self.tokens / self.seconds


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


class DraftedRuns(NamedTuple):
    """The same requests without drafts, with them, and without afterwards: a GPU is not always as
    fast.
    """

    plain: Measured
    drafted: Measured
    after: Measured


def beside(llm: LLM, name: str, case: dict[str, int], runs: DraftedRuns) -> list[BenchRow]:
    """Rows beside those without drafts, of a case. Raises RuntimeError if an answer differs."""
    plain, drafted, after = runs
    if not bits(plain) == bits(drafted) == bits(after):
        raise RuntimeError(f"{name}, batch {case['batch']}: an answer with drafts has other bits")
    counts = drafted.drafters.values()
    tried = sum(count.draft_tokens for count in counts)
    right = sum(count.accepted_tokens for count in counts)
    metrics = {
        "tokens": drafted.tokens,
        "times_as_fast": [plain.seconds / seconds for seconds in drafted.calls],
        "without_drafts_after": plain.seconds / after.seconds,
        "acceptance": right / tried if tried else None,
        "drafters": {name: msgspec.to_builtins(it) for name, it in drafted.drafters.items()},
    }
    if llm.engine.draft_model is not None:
        metrics["draft_step_ms"] = 1e3 * llm.engine.draft_model.times.seconds(case["batch"])
    figures = [
        (name, "steps", drafted.steps, plain.steps),
        (f"{name}, speed", "tokens/s", drafted.rate, plain.rate),
    ]
    if plain.steady is not None and drafted.steady is not None:
        figures.append(
            (f"{name}, speed while all decode", "tokens/s", drafted.steady, plain.steady)
        )
    return [
        engine_row(
            llm.engine,
            case=title,
            value=value,
            unit=unit,
            metrics=metrics if unit == "steps" else None,
            **case,
        ).beside("without drafts", peer)
        for title, unit, value, peer in figures
    ]


def bits(run: Measured) -> list[tuple[object, ...]]:
    """What must be equal of every answer."""
    first = [answer.outputs[0] for answer in run.answers]
    return [(tuple(it.token_ids), it.text, tuple(it.logprob_bits)) for it in first]
