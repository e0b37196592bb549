"""Checks recorded answers by a model that is loaded here."""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tpdet.audit.recorded import RecordedAnswer, RecordedChoice, check_recorded, digest_of
from tpdet.audit.replay import DigestOrigin, answer_digests
from tpdet.client.engine_settings import engine_config, ranks_asked
from tpdet.errors import CheckpointError, DisagreementError, RequestError, UsageError
from tpdet.grammar import trial
from tpdet.launch.ranks.environment import read_environment
from tpdet.llm.llm import LLM
from tpdet.llm.recorded import choices_of, refuse_unverified
from tpdet.llm.results import RequestOutput
from tpdet.requests.answer.json_pieces import json_pieces
from tpdet.requests.answer.prompt_scores import PromptScores, parts_of
from tpdet.requests.answer.whole_answer import WholeAnswer, origin, receipt
from tpdet.requests.body.prepare import Call, Preparer
from tpdet.requests.body.problems import ApiError, request_errors_as_problems
from tpdet.requests.body.work import prepare_call
from tpdet.requests.engine_facts import EngineFacts, LogprobsMode
from tpdet.requests.request import Request, check_against_model, with_seed
from tpdet.requests.routes import RECORDED
from tpdet.text.outputs import RequestAssembler
from tpdet.text.parsing.calls import CallParser
from tpdet.text.parsing.reasoning import ReasoningParser
from tpdet.tools.check.answers import (
    CHANGED,
    BatchLine,
    Line,
    Question,
    asked_body,
    bare_choice,
    check_same_choices,
    check_same_prompt,
)
from tpdet.tools.check.computed import Compared, batch_line, compare_line, offline_line
from tpdet.tools.check.report import Checked

_ROUTED = "routed_experts"


def open_model(
    options: argparse.Namespace, mode: LogprobsMode | None = None, routed: bool = False
) -> LLM:
    """The model that flags ask for, as answers are checked by it.

    mode: of log-probabilities where no flag names one; routed: whether answers have their experts.
    Raises what `LLM` raises, UsageError for settings under which drafts cannot be verified.
    """
    config, ranks = engine_config(options, os.environ), ranks_asked(options)
    refuse_unverified(config.fixed_batch, config.approximate)
    if routed:
        config = config.model_copy(update={f"enable_return_{_ROUTED}": True})
    if mode is not None and "logprobs_mode" not in config.model_fields_set:
        config = config.model_copy(update={"logprobs_mode": mode})
    settings = config.model_dump(include=config.model_fields_set)
    return LLM(**settings, tensor_parallel_size=ranks)


def refuse_launcher(what: str) -> None:
    """Refuse (UsageError) to run under a launcher, where every rank would do it alone.

    what: is done in one process, such as "receipts are replayed".
    """
    rank = read_environment()
    if rank.size > 1:
        raise UsageError(
            f"{what} by one process, and {rank.launcher} started {rank.size} ranks: leave it out, "
            "and let LLM(tensor_parallel_size=N) or --tp N start them"
        )


class Again(NamedTuple):
    """A line that is being computed again: what assembles its prompts' answers.

    `whole` writes the answer to an HTTP request; None for a line of `tpdet generate`.
    """

    line: Line
    assemblers: list[RequestAssembler]
    whole: WholeAnswer | None = None


def check_by_model(
    options: argparse.Namespace, lines: list[Line]
) -> tuple[list[Compared], Checked] | None:
    """What a model that is loaded here finds; None on ranks above 0.

    Raises what `LLM` raises, DisagreementError for an answer of another contract or other weights,
    CheckpointError for one whose request this model reads in another way.
    """
    routed = any(choice.get(_ROUTED) for line in lines for choice in line.shown_choices)
    with open_model(options, lines[0].origin.logprobs_mode, routed) as llm:
        reader = ModelCheck(llm)
        compared, seconds = reader.compare_all(lines)
        if llm.rank > 0:
            return None
    facts = reader.facts
    names = facts.contract, facts.model_digest, facts.system_fingerprint
    return compared, Checked.of(*names, compared, seconds)


class ModelCheck:
    """Makes requests of recorded lines, and the lines of their answers, by one model."""

    def __init__(self, llm: LLM, served_name: str | None = None) -> None:
        """served_name: what answers call the model; None for its path."""
        self._llm, self._tokenizer = llm, llm.tokenizer
        engine = llm.engine
        self.facts = EngineFacts(
            system_fingerprint=llm.system_fingerprint,
            contract=engine.runner.contracts.strict,
            model_digest=engine.runner.model_digest,
            max_model_len=engine.max_model_len,
            vocab_size=engine.model_config.vocab_size,
            eos_token_ids=engine.model_config.eos_token_ids,
            tp=engine.world.size,
            approximate_fingerprint="",
            dtype=engine.model_config.dtype,
            logprobs_mode=llm.config.logprobs_mode,
        )
        self._preparer = Preparer(self.facts, served_name or llm.config.model, self._tokenizer)
        self._parser = ReasoningParser.of("auto", self._tokenizer)
        self._calls = CallParser.of("auto", self._tokenizer)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self._preparer.eos_token_ids

    def compare_all(
        self, lines: Sequence[Line], use_tqdm: bool = True
    ) -> tuple[list[Compared], float]:
        """What differs of each line, and the seconds of computing; nothing on ranks above 0.

        Raises as `check_by_model`, before anything is computed.
        """
        again = [self.read(line) for line in lines]
        begin = time.monotonic()
        assemblers = [one for line in again for one in line.assemblers]
        outputs = iter(self._llm.recompute(assemblers, use_tqdm))
        seconds = time.monotonic() - begin
        if self._llm.rank > 0:
            return [], seconds
        return [
            self.compare(line, [next(outputs) for _ in line.assemblers]) for line in again
        ], seconds

    def record_all(self, asked: Sequence[Question], use_tqdm: bool = True) -> list[dict[str, Any]]:
        """The answers to bodies, as lines of `run-batch --record`; nothing on ranks above 0.

        A body without a seed has its `Question`'s. Raises RequestError for one that cannot run.
        """
        calls = [self._asked(question) for question in asked]
        for question, call in zip(asked, calls, strict=True):
            if isinstance(call, ApiError):
                raise RequestError(f"{question.name}: {call}")
        bodies = self._answered(asked, calls, use_tqdm)
        return [
            question.line(body)
            for question, body in zip(asked, bodies, strict=bool(bodies))
            if not isinstance(body, ApiError)
        ]

    def answer_all(
        self, asked: Sequence[Question], use_tqdm: bool = True
    ) -> list[dict[str, Any] | ApiError]:
        """The bodies that answer bodies, or why one is refused; nothing on ranks above 0."""
        return self._answered(asked, [self._asked(question) for question in asked], use_tqdm)

    def _asked(self, question: Question) -> Call | ApiError:
        """What a body asks for, or why a server refuses it."""
        route, body = RECORDED[question.url], question.seeded_body
        try:
            call = self._calling(prepare_call(route, self._preparer, body, question.name))
            form = call.requests[0].params.form
            if form is not None:
                with request_errors_as_problems():
                    trial.check(form)
        except ApiError as error:
            return error
        return call

    def _answered(
        self, asked: Sequence[Question], calls: Sequence[Call | ApiError], use_tqdm: bool
    ) -> list[dict[str, Any] | ApiError]:
        wholes = [
            call
            if isinstance(call, ApiError)
            else self._whole(call, self._parser if question.split else None)
            for question, call in zip(asked, calls, strict=True)
        ]
        accepted = [whole for whole in wholes if isinstance(whole, WholeAnswer)]
        assemblers = [one for whole in accepted for one in whole.assemblers.values()]
        if assemblers:
            self._llm.recompute(assemblers, use_tqdm)
        if self._llm.rank > 0:
            return []
        return [
            self._body(whole, whole.call.replay_version)
            if isinstance(whole, WholeAnswer)
            else whole
            for whole in wholes
        ]

    def read(self, line: Line) -> Again:
        """The requests that compute a line again, with itself as drafts."""
        if isinstance(line.answer, RecordedAnswer):
            return self._offline(line, line.answer)
        return self._over_http(line, line.answer)

    def compare(self, again: Again, outputs: list[RequestOutput]) -> Compared:
        """Hold a line against its answer."""
        choices = [choice for output in outputs for choice in choices_of(output)]
        line, answer = again.line, again.line.answer
        if isinstance(answer, RecordedAnswer):
            record = msgspec.structs.replace(answer, outputs=tuple(choices))
            digest = digest_of(record, self.eos_token_ids)
            recomputed = msgspec.structs.replace(record, replay_digest=digest)
            whole = msgspec.json.encode(recomputed) if line.is_bare else recomputed.line(outputs[0])
            names = {"replay_digest": digest, "replay_version": answer.replay_version}
            answered = json.loads(whole) | names
            return compare_line(line, choices, offline_line(line, answered))
        assert again.whole is not None
        body = self._body(again.whole, answer.response.body.tpdet.replay_version)
        return compare_line(line, choices, batch_line(line, body))

    def _offline(self, line: Line, answer: RecordedAnswer) -> Again:
        self._check(line, answer)
        text = line.fields.get("prompt")
        if self._tokenizer is None and any(choice.get("text") for choice in line.shown_choices):
            raise UsageError(
                f"{line.where} has text, which needs the tokenizer: leave --skip-tokenizer-init out"
            )
        if isinstance(text, str) and self._tokenizer is not None:
            ids = self._tokenizer.encode(text, most=self.facts.max_model_len)
            check_same_prompt(line, answer.prompt_token_ids, ids)
        request = Request(
            request_id=f"line-{line.number}",
            prompt_token_ids=answer.prompt_token_ids,
            params=answer.params,
            eos_token_ids=self.eos_token_ids,
        )
        request = self._with_drafts(line, request, answer.seed, answer.outputs)
        return Again(line, [RequestAssembler(request, self._tokenizer)])

    def _over_http(self, line: Line, answer: BatchLine) -> Again:
        call = self._call(line, answer)
        recorded, source, requests = answer.response.body, answer.response.body.tpdet, []
        seeds = source.seeds_of(len(call.requests), line.where)
        for index, request in enumerate(call.requests):
            choices = recorded.choices[index * call.choices : (index + 1) * call.choices]
            for choice in choices:
                check_same_prompt(line, choice.prompt_token_ids, request.prompt_token_ids)
            params = request.params
            if params.form is not None:
                after = source.json_schema_after
                params = msgspec.structs.replace(params, json_schema_after=after)
            outputs = tuple(map(bare_choice, choices))
            record = RecordedAnswer(
                contract=source.contract,
                weights=source.weights,
                seed=seeds[index],
                prompt_token_ids=request.prompt_token_ids,
                params=params,
                outputs=outputs,
                replay_version=source.replay_version,
                logprobs_mode=source.logprobs_mode,
            )
            self._check(line, record)
            request = msgspec.structs.replace(request, params=params)
            requests.append(self._with_drafts(line, request, record.seed, outputs))
        parser = self._parser if line.is_split else None
        if line.is_split and parser is None:
            raise DisagreementError(
                f"{line.where} was made with a reasoning parser, and this tokenizer has no "
                "marks of one: check it with the tokenizer that made it"
            )
        call = dataclasses.replace(call, requests=tuple(requests))
        whole = self._whole(call, parser)
        return Again(line, [*whole.assemblers.values()], whole)

    def _call(self, line: Line, answer: BatchLine) -> Call:
        """The requests of a body, as the server reads it."""
        body = asked_body(line, answer)
        body.pop("tpdet", None)
        route = RECORDED[answer.request.url]
        try:
            call = self._calling(prepare_call(route, self._preparer, body, str(line.number)))
        except ApiError as error:
            raise CheckpointError(
                f"{line.where}: its request is refused: {error} ({CHANGED})"
            ) from None
        check_same_choices(line, len(call.requests) * call.choices)
        return call

    def _calling(self, call: Call) -> Call:
        """The call, its tools called in the form of this model's chat template."""
        with request_errors_as_problems():
            return call.calling(self._calls)

    def _whole(self, call: Call, parser: ReasoningParser | None) -> WholeAnswer:
        return WholeAnswer(call, self._tokenizer, parser, self._calls)

    def _check(self, line: Line, answer: RecordedAnswer) -> None:
        facts, where = self.facts, line.where
        names = facts.contract, facts.model_digest
        check_recorded(answer, where, *names, facts.vocab_size, facts.logprobs_mode)

    def _with_drafts(
        self, line: Line, request: Request, seed: int, outputs: tuple[RecordedChoice, ...]
    ) -> Request:
        """The request with the seed that was used, its recorded answer as drafts."""
        drafts = tuple(choice.token_ids for choice in outputs)
        request = msgspec.structs.replace(with_seed(request, seed), drafts=drafts)
        try:
            check_against_model(request, self.facts.vocab_size, self.facts.max_model_len)
            if request.params.form is not None:
                trial.check(request.params.form)
        except RequestError as error:
            raise RequestError(f"{line.where}: {error}", error.param) from None
        return request

    def _body(self, whole: WholeAnswer, version: int) -> dict[str, Any]:
        """The body that a server of this model answers."""
        for name, assembler in whole.assemblers.items():
            if assembler.prompt is not None:
                scores = whole.prompts[name] = PromptScores()
                for part in parts_of(assembler.prompt):
                    scores.add(part)
        facts, call = self.facts, whole.call
        seed = call.requests[0].params.seed
        assert seed is not None
        names, how = (facts.contract, facts.model_digest), (version, facts.logprobs_mode)
        digests = answer_digests(call.requests, whole.tokens(), DigestOrigin(seed, *names, *how))
        whole.show_ids(digests.request)
        named = origin(call, *names) if call.token_ids else {}
        shown = receipt(named, call.seeds(seed), digests, *how)
        body = whole.body(seed, facts.system_fingerprint, shown)
        return json.loads("".join(json_pieces(body)))
