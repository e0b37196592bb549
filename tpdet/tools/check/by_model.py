"""Checks recorded answers by a model that is loaded here."""

import argparse
import dataclasses
import json
import os
import time
from typing import Any, NamedTuple

import msgspec

from tpdet.audit.replay import replay_digest
from tpdet.client.engine_settings import engine_config, ranks_asked
from tpdet.errors import CheckpointError, DisagreementError, RequestError, UsageError
from tpdet.grammar import trial
from tpdet.llm.llm import LLM
from tpdet.llm.recorded import (
    RecordedAnswer,
    RecordedChoice,
    check_recorded,
    choices_of,
    digest_of,
    refuse_unverified,
)
from tpdet.llm.results import RequestOutput
from tpdet.requests.answer.json_pieces import json_pieces
from tpdet.requests.answer.prompt_scores import PromptScores, parts_of
from tpdet.requests.answer.whole_answer import WholeAnswer, origin, receipt
from tpdet.requests.body.prepare import Call, Preparer
from tpdet.requests.body.problems import ApiError
from tpdet.requests.body.work import prepare_call
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import Request, check_against_model, with_seed
from tpdet.text.outputs import RequestAssembler
from tpdet.text.reasoning import ReasoningParser
from tpdet.tools.check.answers import (
    CHANGED,
    ROUTES,
    BatchLine,
    Line,
    asked_body,
    check_same_choices,
    check_same_prompt,
)
from tpdet.tools.check.computed import Compared, batch_line, compare_line, offline_line
from tpdet.tools.check.report import Checked

_ROUTED = "routed_experts"


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
    config, ranks = engine_config(options, os.environ), ranks_asked(options)
    refuse_unverified(config.fixed_batch, config.approximate)
    if any(choice.get(_ROUTED) for line in lines for choice in line.shown_choices):
        config = config.model_copy(update={f"enable_return_{_ROUTED}": True})
    given = config.model_dump(include=config.model_fields_set)
    with LLM(**given, tensor_parallel_size=ranks) as llm:
        reader = ModelCheck(llm)
        again = [reader.read(line) for line in lines]
        begin = time.monotonic()
        outputs = iter(llm.recompute([one for line in again for one in line.assemblers]))
        seconds = time.monotonic() - begin
        if llm.rank > 0:
            return None
        found = [reader.compare(line, [next(outputs) for _ in line.assemblers]) for line in again]
    facts = reader.facts
    names = facts.contract, facts.model_digest, facts.system_fingerprint
    return found, Checked.of(*names, found, seconds)


class ModelCheck:
    """Makes requests of recorded lines, and the lines of their answers, by one model."""

    def __init__(self, llm: LLM) -> None:
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
        )
        self._preparer = Preparer(self.facts, llm.config.model, self._tokenizer)
        self._parser = ReasoningParser.of("auto", self._tokenizer)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self._preparer.eos_token_ids

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
        return compare_line(line, choices, batch_line(line, self._body(again.whole, line, answer)))

    def _offline(self, line: Line, answer: RecordedAnswer) -> Again:
        self._check(line, answer)
        text = line.fields.get("prompt")
        if self._tokenizer is None and any(choice.get("text") for choice in line.shown_choices):
            raise UsageError(
                f"line {line.number} has text, which needs the tokenizer: leave "
                "--skip-tokenizer-init out"
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
        found, requests = answer.response.body, []
        for place, request in enumerate(call.requests):
            choices = found.choices[place * call.choices : (place + 1) * call.choices]
            for choice in choices:
                check_same_prompt(line, choice.prompt_token_ids, request.prompt_token_ids)
            params = request.params
            if params.form is not None:
                after = found.tpdet.json_schema_after
                params = msgspec.structs.replace(params, json_schema_after=after)
            outputs = tuple(RecordedChoice(c.token_ids, c.logprob_bits) for c in choices)
            record = RecordedAnswer(
                contract=found.tpdet.contract,
                weights=found.tpdet.weights,
                seed=found.tpdet.seed,
                prompt_token_ids=request.prompt_token_ids,
                params=params,
                outputs=outputs,
                replay_version=found.tpdet.replay_version,
            )
            self._check(line, record)
            request = msgspec.structs.replace(request, params=params)
            requests.append(self._with_drafts(line, request, record.seed, outputs))
        parser = self._parser if line.is_split else None
        if line.is_split and parser is None:
            raise DisagreementError(
                f"line {line.number} was made with a reasoning parser, and this tokenizer has no "
                "marks of one: check it with the tokenizer that made it"
            )
        call = dataclasses.replace(call, requests=tuple(requests))
        whole = WholeAnswer(call, self._tokenizer, parser)
        return Again(line, [*whole.assemblers.values()], whole)

    def _call(self, line: Line, answer: BatchLine) -> Call:
        """The requests of a body, as the server reads it."""
        body = asked_body(line, answer)
        body.pop("tpdet", None)
        route = ROUTES[answer.request.url]
        try:
            call = prepare_call(route, self._preparer, body, str(line.number))
        except ApiError as error:
            raise CheckpointError(
                f"line {line.number}: its request is refused: {error} ({CHANGED})"
            ) from None
        check_same_choices(line, len(call.requests) * call.choices)
        return call

    def _check(self, line: Line, answer: RecordedAnswer) -> None:
        facts = self.facts
        place = f"line {line.number}"
        check_recorded(answer, place, facts.contract, facts.model_digest, facts.vocab_size)

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
            raise RequestError(f"line {line.number}: {error}", error.param) from None
        return request

    def _body(self, whole: WholeAnswer, line: Line, answer: BatchLine) -> dict[str, Any]:
        """The body that a server of this model answers."""
        for name, assembler in whole.assemblers.items():
            if assembler.prompt is not None:
                scores = whole.prompts[name] = PromptScores()
                for part in parts_of(assembler.prompt):
                    scores.add(part)
        facts, call, recorded = self.facts, whole.call, answer.response.body.tpdet
        names = facts.contract, facts.model_digest
        digest = replay_digest(
            call.requests, whole.tokens(), recorded.seed, *names, recorded.replay_version
        )
        shown = receipt(origin(call, *names), recorded.seed, digest, recorded.replay_version)
        body = whole.body(recorded.seed, facts.system_fingerprint, shown)
        found: dict[str, Any] = json.loads("".join(json_pieces(body)))
        return found
