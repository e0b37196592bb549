"""The choices of one call, and the JSON of its whole answer.

A server writes an answer with it; `tpdet check` writes the answer that a recorded one is held
against.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tpdet.audit.replay import AnswerDigests
from tpdet.control.row_messages import SampledToken
from tpdet.requests.answer.choices import ChoiceWriter, Json, envelope, usage
from tpdet.requests.answer.messages import MessageWriter
from tpdet.requests.answer.prompt_scores import PromptScores
from tpdet.requests.answer.responses import ResponseWriter
from tpdet.requests.answer.sglang_choices import SglangChoiceWriter
from tpdet.requests.answer.token_choices import TokenChoiceWriter
from tpdet.requests.body.prepare import Call
from tpdet.requests.engine_facts import RAW_LOGPROBS, LogprobsMode
from tpdet.requests.request import Request
from tpdet.requests.shown_ids import ShownIds
from tpdet.text.outputs import RequestAssembler, WeightSpan
from tpdet.text.parsing.calls import CallParser, output_parser
from tpdet.text.parsing.parser import OutputParser
from tpdet.text.parsing.reasoning import ReasoningParser
from tpdet.text.tokenizer import Tokenizer

FormWriter = MessageWriter | ResponseWriter
"""Writes the one choice of a call as another API's events, by type; `whole` is what they add up to.

`begin` gives those before the first token, `add` those of a token, `end` those of the end, `fail`
those of an error behind the first byte. `mark` stands behind the last one.
"""
FORM_WRITERS: dict[str, Callable[[Call], FormWriter]] = {
    "messages": MessageWriter,
    "responses": ResponseWriter,
}
"""By `Call.form.api`."""
DIGESTS = ("request_digest", "replay_digest")
"""How an answer names its `AnswerDigests`."""

_WRITERS: dict[str, type[ChoiceWriter]] = {
    "completion": ChoiceWriter,
    "chat": ChoiceWriter,
    "tokens": TokenChoiceWriter,
    "sglang": SglangChoiceWriter,
}


class WholeAnswer:
    """What assembles and what writes each choice of a call.

    `assemblers` have a request's outputs, by its id; `writers` a choice's JSON, by that id and its
    place; `prompts` the scores of the prompts that have some.
    """

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer | None,
        reasoning: ReasoningParser | None,
        calls: CallParser | None = None,
    ) -> None:
        """reasoning: what splits the answers of chats; None where they are not split.

        calls: what reads calls of tools, where the call has tools.
        """
        self.call = call
        self._reasoning = reasoning if call.kind == "chat" else None
        self._calls = None if call.tools is None else calls
        if self._calls is not None and self._calls.harmony is not None:
            self._reasoning = self._calls.harmony  # its calls stand among its messages
        self.ids: ShownIds | None = None
        self.form = None if call.form is None else FORM_WRITERS[call.form.api](call)
        """What writes the answer in another API's form; None where it has its own."""
        self.prompts: dict[str, PromptScores] = {}
        self.assemblers = {
            request.request_id: RequestAssembler(request, tokenizer, self._splitter(request))
            for request in call.requests
        }
        self.writers = {
            (request.request_id, choice): _WRITERS[call.kind](
                call,
                tokenizer,
                i * call.choices + choice,
                reasoning=self._reasoning is not None and call.include_reasoning,
            )
            for i, request in enumerate(call.requests)
            for choice in range(call.choices)
        }

    def show_ids(self, digest: str) -> None:
        """Have an answer with tools show ids that follow from its request, given its digest."""
        if self._calls is not None or self.form is not None:
            self.ids = ShownIds(digest, "" if self._calls is None else self._calls.family.name)
            for writer in self.writers.values():
                writer.ids = self.ids

    def body(
        self,
        seed: int,
        fingerprint: str | None,
        receipt: Json,
        spans: Callable[[Sequence[WeightSpan]], list[Json]] | None = None,
    ) -> Json | Iterator[Json]:
        """The answer once all choices have ended; some of its arrays are made as it is written.

        spans: makes the `weight_versions` of a choice, where they are to be shown.
        """
        call = self.call
        if self.form is not None:
            around = envelope(call, seed, fingerprint, stream=False) | {"tpdet": receipt}
            return self._in_form(self.form, around)
        if call.sglang is not None:
            with_receipt = SglangChoiceWriter.with_receipt
            objects = (with_receipt(c, receipt, fingerprint) for c in self._choices(spans))
            return next(objects) if call.sglang.single else objects
        found = envelope(call, seed, fingerprint, stream=False) | {"tpdet": receipt}
        found |= {} if self.ids is None else {"id": self.ids.chat}
        beside = {} if call.kind == "completion" else self._of_prompt(call.kind == "tokens")
        return {**found, **beside, "choices": self._choices(spans), "usage": self.usage()}

    def _in_form(self, form: FormWriter, around: Json) -> Json:
        """The answer in another API's form: what its stream would add up to."""
        if self.ids is None:
            raise ValueError("the answer has no ids: call show_ids first")
        (assembler,) = self.assemblers.values()
        form.begin(self.ids, around)
        form.add(assembler.as_delta(0))
        form.end(around, self.usage())
        return form.whole

    def _of_prompt(self, always: bool) -> Json:
        """What stands beside the choices of a prompt: its ids and scores; always: null for none."""
        call, fields = self.call, Json()
        request = call.requests[0]
        if call.token_ids or always:
            fields["prompt_token_ids"] = request.prompt_token_ids if call.token_ids else None
        if call.prompt_logprobs is not None or always:
            writer = self.writers[request.request_id, 0]
            fields["prompt_logprobs"] = writer.prompt_logprobs(self.prompts.get(request.request_id))
        return fields

    def usage(self) -> Json:
        """The counts of tokens so far."""
        assemblers = self.assemblers.values()
        found = usage(self.call, sum(assembler.generated_tokens for assembler in assemblers))
        if self.call.kind == "chat":
            cached = sum(assembler.cached_tokens for assembler in assemblers)
            found["prompt_tokens_details"] = {"cached_tokens": cached}
        details: dict[str, int] = {}
        if self._reasoning is not None:
            details["reasoning_tokens"] = sum(one.reasoning_tokens for one in assemblers)
        if self.call.requests[0].prediction:
            # OpenAI's counts; tokens that nobody came to verify are in none.
            verified = sum(assembler.draft_tokens for assembler in assemblers)
            accepted = sum(assembler.accepted_draft_tokens for assembler in assemblers)
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = verified - accepted
        return found | ({"completion_tokens_details": details} if details else {})

    def tokens(self) -> Iterator[Iterator[Sequence[SampledToken]]]:
        """The tokens of each prompt's choices, as `replay_digest` takes them."""
        return map(self._tokens, self.assemblers.values())

    def _tokens(self, assembler: RequestAssembler) -> Iterator[Sequence[SampledToken]]:
        return (assembler.choice(index).logprobs for index in range(self.call.choices))

    def _choices(
        self, spans: Callable[[Sequence[WeightSpan]], list[Json]] | None
    ) -> Iterator[Json]:
        for (request_id, choice), writer in self.writers.items():
            answer = self.assemblers[request_id].choice(choice)
            versions = None if spans is None else spans(answer.weight_spans)
            yield writer.whole(answer, self.prompts.get(request_id), versions)

    def _splitter(self, request: Request) -> Callable[[], OutputParser] | None:
        """Makes what splits a choice; if a schema holds from the first token, all is content."""
        params, use = request.params, self.call.tools
        ids, keep = request.prompt_token_ids, self.call.include_reasoning
        if self._calls is not None and use is not None:
            schemas = {tool.name: tool.parameters or {} for tool in use.callable}
            tokenizer = self._calls.tokenizer
            return partial(
                output_parser, tokenizer, ids, self._reasoning, self._calls, schemas, keep
            )
        all_content = params.form is not None and not params.json_schema_after
        if self._reasoning is None or all_content:
            return None
        return partial(self._reasoning.splitter, ids, keep)


def origin(call: Call, contract: str, weights: str) -> Json:
    """What computes an answer, for those who record its tokens, and what the server chose for it.

    contract, weights: contract id and model digest.
    """
    params = call.requests[0].params
    named: Json = {"contract": contract, "weights": weights, "max_tokens": params.max_tokens}
    after = params.json_schema_after
    return named | ({"json_schema_after": list(after)} if after else {})


def receipt(
    origin: Json,
    seeds: Json,
    digests: AnswerDigests,
    version: int,
    mode: LogprobsMode = RAW_LOGPROBS,
) -> Json:
    """The seeds that replay an answer, as `Call.seeds` names them, and the digests of a replay.

    version: of the replay digest; mode: what the answer's log-probabilities are of.
    """
    named = dict(zip(DIGESTS, digests, strict=True))
    return {**origin, **seeds, **named, "replay_version": version, "logprobs_mode": mode}
