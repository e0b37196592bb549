"""Turns a checked body into requests for the engine; refuses what the engine cannot run.

Runs in the HTTP process, in a thread when the body is large. Needs no torch.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from tpdet.audit.replay import VERSION, request_seed, seeds_that_differ
from tpdet.errors import RequestError
from tpdet.grammar.layouts import LAYOUTS, layout_of
from tpdet.grammar.tool_calls import CallForm, form_of_calls
from tpdet.requests.answer_form import AnswerForm
from tpdet.requests.body import limits
from tpdet.requests.body.answer_size import check_answer_size
from tpdet.requests.body.messages_body import MessagesBody, MessagesChat, MessagesForm
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.problems import ApiError, bad_request, request_errors_as_problems
from tpdet.requests.body.prompts import BodyPrompt, BodyPrompts
from tpdet.requests.body.responses_body import (
    ResponsesBody,
    ResponsesForm,
    by_response_names,
    chat_of,
)
from tpdet.requests.body.resume import FIELD, ResumePoint, check_origin, resume_of
from tpdet.requests.body.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    OwnFields,
    ResponseFormat,
    StreamOptions,
)
from tpdet.requests.body.sglang_body import SglangBody, SglangForm
from tpdet.requests.body.token_bodies import TokensBody
from tpdet.requests.engine_facts import AnswerOrigin, EngineFacts
from tpdet.requests.parameter_checks import beside_given_ids, check_schema_after
from tpdet.requests.request import (
    Request,
    SamplingParams,
    check_against_model,
    room_behind,
    with_seed,
)
from tpdet.requests.resumed import check_resumed_counts
from tpdet.requests.routes import CallRoute
from tpdet.requests.structured_outputs import FIELD as FORM
from tpdet.requests.structured_outputs import OLDER, form_in, schema_text
from tpdet.requests.tools import ToolUse
from tpdet.text.parsing.calls import CallParser
from tpdet.text.parsing.reasoning import ReasoningParser
from tpdet.text.tokenizer import Tokenizer, ending_ids

DEFAULT_COMPLETION_TOKENS = 16
_CONVERTED = ("max_tokens", "stop", "stop_token_ids", "logit_bias", "prompt_logprobs")
_PASSED_ON = [
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationBody.model_fields and name not in _CONVERTED
]
"""Fields whose name and meaning are those of `SamplingParams`."""


CallKind = Literal["completion", "chat", "tokens", "sglang"]
_PREFIXES = {
    "completion": "cmpl",
    "chat": "chatcmpl",
    "tokens": "generate-tokens",
    "sglang": "generate",
}


class Echo(NamedTuple):
    """A prompt as `echo` shows it; of its ids, the first `hidden` stand for nothing in the text."""

    text: str
    hidden: int


@dataclass(frozen=True)
class Call:
    """One HTTP request for text: the requests to run, and the form of its answer.

    `requests[i]` is prompt i, and its choices have the indices `i * n` to `i * n + n - 1`.
    `logprobs` is the number of alternatives to show, None for no log-probabilities. `resume` says
    where the tokens come from that the client has already (`Request.resumed`).
    `include_reasoning`: where reasoning is split from the content, the answer holds it too.
    `replay_version`: of the digest that the answer gets. `answer_id`: what an answer of token ids
    names. `experts_shape`: (layers, experts chosen) of each token, where answers have them;
    of the first `experts_start` tokens they have none. `experts_as_object`: in prime-rl's form.
    `weight_versions`: choices say which weights computed them, also where it was one.
    `sglang`: of an answer of SGLang's form, what it holds. `given_ids`: the request names the ids
    beside a token, which have no ranks. `tools`: that an answer may call; `calls_after`:
    the ids behind which the body has their grammar hold. `form`: of an answer to a chat in another
    API's form.
    """

    kind: CallKind
    group_id: str
    created: int
    model: str
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    echoes: tuple[Echo, ...]
    token_names: bool
    token_ids: bool
    resume: ResumePoint | None = None
    include_reasoning: bool = True
    replay_version: int = VERSION
    answer_id: str = ""
    experts_shape: tuple[int, int] = (0, 0)
    experts_start: int = 0
    experts_as_object: bool = False
    weight_versions: bool = False
    sglang: SglangForm | None = None
    given_ids: bool = False
    tools: ToolUse | None = None
    calls_after: tuple[int, ...] | None = None
    form: MessagesForm | ResponsesForm | None = None

    @property
    def route(self) -> CallRoute:
        """The route whose body it is of."""
        return self.kind if self.form is None else self.form.api

    @property
    def shows_tokens(self) -> bool:
        """Whether an answer shows more of a token than its text."""
        by_ids = self.kind in ("tokens", "sglang")
        return by_ids or self.logprobs is not None or self.token_ids

    @property
    def choices(self) -> int:
        """Choices of each prompt."""
        return self.requests[0].params.n

    def seeded_by_requests(self) -> "Call":
        """The same, each prompt that has no seed with the one that it gives itself."""
        requests = tuple(
            with_seed(request, request_seed(request)) if request.params.seed is None else request
            for request in self.requests
        )
        return replace(self, requests=requests)

    def seeds(self, seed: int) -> dict[str, Any]:
        """How an answer names the seeds that were used; seed: its first prompt's."""
        seeds = seeds_that_differ(self.requests)
        return {"seed": None, "seeds": [*seeds]} if seeds else {"seed": seed}

    def calling(self, parser: CallParser | None) -> "Call":
        """The same, its calls of tools in the form that the parser reads. Raises RequestError."""
        (request, *_), use = self.requests, self.tools
        if use is None:
            return self
        if parser is None:
            raise RequestError(
                "tools: this server reads no calls of them: start it with --tool-call-parser and "
                "the family of the model",
                "tools",
            )
        tokenizer, family = parser.tokenizer, parser.family.name
        template = tokenizer.chat_template.source if tokenizer.chat_template else ""
        layout, asked = layout_of(family, tokenizer.added_tokens, template), request.params.form
        if asked is not None and asked.kind != "json_schema":
            raise RequestError(
                f"{asked.field} beside tools is JSON of a schema: send one of the two", asked.field
            )
        text = form_of_calls(use, layout, None if asked is None else json.loads(asked.text))
        if text is None:
            check_schema_after(self.calls_after, None)
            return self
        fields: dict[str, Any] = {"tool_calls": text, "json_schema": None}
        if self.calls_after is not None:
            fields["json_schema_after"] = self.calls_after
        params = msgspec.structs.replace(request.params, **fields)
        return replace(self, requests=(msgspec.structs.replace(request, params=params),))

    def reasoning_first(self, parser: ReasoningParser, vocab_size: int) -> "Call":
        """The same, a chat's schema held behind its reasoning unless the body says otherwise.

        vocab_size: the model's; with marks outside of it no answer reasons.
        """
        (request, *more), params = self.requests, self.requests[0].params
        given = params.form is None or params.json_schema_after is not None
        if more or given or self.kind != "chat":
            return self
        if params.tool_calls and LAYOUTS[CallForm.of(params.tool_calls).layout].messages:
            return self  # the grammar holds the reasoning too
        after = parser.schema_after(request.prompt_token_ids)
        if max(after, default=0) >= vocab_size:
            return self
        params = msgspec.structs.replace(params, json_schema_after=after)
        return replace(self, requests=(msgspec.structs.replace(request, params=params),))


@dataclass(frozen=True)
class Preparer:
    """Checks bodies against the model: its facts, its name and its tokenizer.

    `tenant_salt` stands for the client's key; requests share cached prefixes only under one.
    """

    facts: EngineFacts
    served_name: str
    tokenizer: Tokenizer | None
    tenant_salt: str = ""

    @property
    def prompts(self) -> BodyPrompts:
        """Turns text and conversations into token ids."""
        return BodyPrompts(self.tokenizer, self.facts.max_model_len)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the model's and the tokenizer's, ascending."""
        return ending_ids(self.facts.eos_token_ids, self.tokenizer)

    def tokens(self, body: TokensBody, request_id: str) -> Call:
        """The request of `POST /inference/v1/generate`. Raises ApiError or RequestError."""
        call = self.completion(body.completion(), request_id, "tokens")
        answer_id = f"{_PREFIXES['tokens']}-{body.request_id or request_id}"
        start = body.sampling_params.routed_experts_prompt_start
        call = self._with_experts(call, start or 0, "routed_experts_prompt_start")
        as_object = body.sampling_params.routed_experts_format == "object"
        return replace(call, answer_id=answer_id, weight_versions=True, experts_as_object=as_object)

    def sglang(self, body: SglangBody, request_id: str) -> Call:
        """The requests of `POST /generate`. Raises ApiError or RequestError."""
        call = self.completion(body.completion(), request_id, "sglang")
        form = body.form(request_id, len(call.requests))
        if form.start is not None:
            requests = tuple(_scored_from(request, form.start) for request in call.requests)
            call = replace(call, requests=requests)
        if form.experts and not self.facts.experts_shape[0]:
            raise bad_request(
                "return_routed_experts: this model has no experts: leave it out",
                "return_routed_experts",
                "not_supported",
            )
        start = body.routed_experts_start_len or 0
        call = self._with_experts(call, start, "routed_experts_start_len")
        return replace(call, sglang=form, weight_versions=True)

    def _with_experts(self, call: Call, start: int, name: str) -> Call:
        """The call whose answers have experts from a token of the prompt on."""
        shortest = min(len(request.prompt_token_ids) for request in call.requests)
        if start >= shortest:
            raise bad_request(
                f"{name} {start}: the prompt has {shortest} tokens: give the place of one", name
            )
        return replace(call, experts_shape=self.facts.experts_shape, experts_start=start)

    def completion(
        self, body: CompletionBody, request_id: str, kind: CallKind = "completion"
    ) -> Call:
        """Requests of `POST /v1/completions`, or of what is one. Raises ApiError or RequestError.

        Without a number of tokens a completion has 16, others the rest of the context.
        """
        self.check_model(body.model)
        body = _beside_given_ids(body, "logprobs")
        scored = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scored = max(body.logprobs, scored or 0)
            if body.prompt_logprobs_last_n is not None:
                raise bad_request(
                    "prompt_logprobs_last_n: echo with logprobs shows the scores of all tokens: "
                    "leave one of them out",
                    "prompt_logprobs_last_n",
                )
        max_tokens = _max_tokens(body)
        prompts = self.prompts.of_completion(body)
        if max_tokens is None and kind == "completion":
            max_tokens = DEFAULT_COMPLETION_TOKENS
        elif max_tokens is None:
            longest = max(len(prompt.token_ids) for prompt in prompts)
            max_tokens = room_behind(longest, self.facts.max_model_len)
        size = _Size(max_tokens, body.logprobs, scored)
        return self._call(kind, request_id, body, prompts, size)

    def chat(self, body: ChatBody, request_id: str) -> Call:
        """The request of `POST /v1/chat/completions`. Raises ApiError or RequestError."""
        self.check_model(body.model)
        body = _beside_given_ids(body, "top_logprobs")
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        prompt = self.prompts.of_chat(body)
        max_tokens = _max_tokens(body)
        room = room_behind(len(prompt.token_ids), self.facts.max_model_len)
        if max_tokens is None or _own(body).fitted:
            max_tokens = room if max_tokens is None else min(max_tokens, room)
        shown = (body.top_logprobs or 0) if body.logprobs else None
        size = _Size(max_tokens, shown, body.prompt_logprobs)
        use, own = body.tool_use(body.parallel_tool_calls), _own(body)
        after = own.json_schema_after
        if use is None or after is None or _form(body) is not None:
            return replace(self._call("chat", request_id, body, [prompt], size), tools=use)
        own = own.model_copy(update={"json_schema_after": None})
        body = body.model_copy(update={"tpdet": own})
        call = self._call("chat", request_id, body, [prompt], size)
        return replace(call, tools=use, calls_after=tuple(after))

    def responses(self, body: ResponsesBody, request_id: str) -> Call:
        """The request of `POST /v1/responses`. Raises ApiError."""
        fields, form, items = chat_of(body)
        with request_errors_as_problems(lambda error: by_response_names(error, items)):
            call = self.chat(parse_body(ChatBody, fields), request_id)
        return replace(call, form=form)

    def messages(self, body: MessagesBody, request_id: str) -> Call:
        """The request of `POST /v1/messages`. Raises ApiError."""
        chat = MessagesChat(body)
        with request_errors_as_problems(chat.refused):
            call = self.chat(parse_body(ChatBody, chat.fields), request_id)
        return replace(call, form=chat.form)

    def check_model(self, name: str | None) -> None:
        """Refuse (404) a model this server does not serve."""
        if name is not None and name != self.served_name:
            raise ApiError(
                404,
                f"the model {name[:80]!r} is not served here: use {self.served_name!r}",
                param="model",
                code="model_not_found",
            )

    def _call(
        self,
        kind: CallKind,
        request_id: str,
        body: CompletionBody | ChatBody,
        prompts: list[BodyPrompt],
        size: "_Size",
    ) -> Call:
        resume = resume_of(body)
        point = None
        if resume is not None:
            named = AnswerOrigin(resume.contract, resume.weights, resume.logprobs_mode)
            point = ResumePoint(FIELD, named)
            check_origin(point, self.facts)
        options = _stream_options(body)
        group_id = f"{_PREFIXES[kind]}-{request_id}"
        _check_size("user", body.user, limits.MAX_USER_BYTES)
        _check_size("cache_salt", body.cache_salt, limits.MAX_CACHE_SALT_BYTES)
        seeds = _seeds(body, len(prompts))
        requests = tuple(
            self._request(f"{group_id}-{i}", body, prompt, size, seed)
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        )
        echo = isinstance(body, CompletionBody) and bool(body.echo)
        _check_predictions(body, len(requests), echo)
        check_answer_size(
            [len(prompt.token_ids) for prompt in prompts],
            body,
            chat=kind == "chat",
            echo=echo,
            logprobs=size.logprobs,
            max_tokens=size.max_tokens,
        )
        return Call(
            kind=kind,
            group_id=group_id,
            created=int(time.time()),
            model=self.served_name,
            requests=requests,
            stream=bool(body.stream),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            logprobs=size.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            echo=echo,
            echoes=tuple(Echo(self.prompts.text(p), p.hidden) for p in prompts) if echo else (),
            token_names=bool(body.return_tokens_as_token_ids),
            token_ids=bool(body.return_token_ids),
            given_ids=bool(body.logprob_token_ids),
            weight_versions=bool(body.return_weight_versions),
            resume=point,
            include_reasoning=not isinstance(body, ChatBody) or body.include_reasoning is not False,
            replay_version=_own(body).replay_version or VERSION,
        )

    def _request(
        self,
        request_id: str,
        body: GenerationBody,
        prompt: BodyPrompt,
        size: "_Size",
        seed: int | None,
    ) -> Request:
        given = {name: getattr(body, name) for name in _PASSED_ON} | {"seed": seed}
        resume, drafts, form = resume_of(body), _drafts(body), _form(body)
        if resume is not None:
            given["seed"] = resume.seed
        if form is not None:
            given[form.kind] = form.text
        params = SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            max_tokens=size.max_tokens,
            stop=_stops(body.stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logit_bias=_logit_bias(body.logit_bias or {}),
            json_schema_after=_own(body).json_schema_after,
            logprobs=size.logprobs,
            prompt_logprobs=size.prompt_logprobs,
        )
        if self.tokenizer is None and params.form is not None:
            raise RequestError("this server has no tokenizer", params.form.field)
        if self.tokenizer is None and params.stop:
            raise RequestError("this server has no tokenizer: use stop_token_ids", "stop")
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt.token_ids),
            params=params,
            eos_token_ids=self.eos_token_ids,
            cache_salt=body.cache_salt or "",
            tenant_salt=self.tenant_salt,
            drafts=drafts,
            resumed=() if resume is None else tuple(map(len, drafts)),
            prediction=self.prompts.of_prediction(body.prediction),
        )
        check_against_model(request, self.facts.vocab_size, self.facts.max_model_len)
        check_resumed_counts(request, FIELD)
        return request


class _Size(NamedTuple):
    """How many tokens each choice may have, and the alternatives shown beside tokens and prompt's.

    None for no log-probabilities of either.
    """

    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None


def _stream_options(body: GenerationBody) -> StreamOptions:
    """What a stream carries. Raises ApiError for fields that a stream, or no stream, rules out."""
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs cannot be streamed: set stream to false", "stream")
    options = body.stream_options or StreamOptions()
    if (options.include_usage or options.continuous_usage_stats) and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise bad_request(
            "stream_options: continuous_usage_stats needs include_usage to be true",
            "stream_options",
        )
    return options


Asked = TypeVar("Asked", CompletionBody, ChatBody)


def _beside_given_ids(body: Asked, name: str) -> Asked:
    """The body with as many alternatives as its `logprob_token_ids` are, if it has some.

    name: its field for those of sampled tokens. Raises RequestError for another number there.
    """
    if not body.logprob_token_ids:
        return body
    counts = {field: getattr(body, field) for field in (name, "prompt_logprobs")}
    return body.model_copy(update=beside_given_ids(body.logprob_token_ids, counts))


def _scored_from(request: Request, start: int) -> Request:
    """The request with scores of its prompt behind token `start` alone."""
    last, prompt = len(request.prompt_token_ids) - 1 - start, request.params.prompt_logprobs
    if last < 0:
        raise RequestError(
            f"logprob_start_len {start} is behind the prompt of {last + 1 + start} tokens: lower "
            "it, or leave it out",
            "logprob_start_len",
        )
    fields = {"prompt_logprobs": prompt, "prompt_logprobs_last_n": last}
    if last == 0:
        fields = {"prompt_logprobs": None, "prompt_logprobs_last_n": None}
    return msgspec.structs.replace(
        request, params=msgspec.structs.replace(request.params, **fields)
    )


def _own(body: GenerationBody) -> OwnFields:
    return body.tpdet or OwnFields()


def _seeds(body: GenerationBody, prompts: int) -> Sequence[int | None]:
    """The seed of each prompt, as far as the body has them. Raises ApiError."""
    seeds = _own(body).seeds
    if seeds is None:
        return [body.seed] * prompts
    if body.seed is not None:
        raise bad_request("seed and tpdet.seeds are given: send one of them", "tpdet.seeds")
    if len(seeds) != prompts:
        raise bad_request(
            f"tpdet.seeds has {len(seeds)} seeds for {prompts} prompts: send one for each",
            "tpdet.seeds",
        )
    return seeds


def _max_tokens(body: GenerationBody) -> int | None:
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad_request(
            f"max_tokens {both[0]} and max_completion_tokens {both[1]} differ: send one",
            "max_completion_tokens",
        )
    return both[0] if both[0] is not None else both[1]


def _drafts(body: GenerationBody) -> tuple[tuple[int, ...], ...]:
    own = _own(body)
    given = own.drafts if own.resume is None else own.resume.choices
    return tuple(map(tuple, given or ()))


def _check_predictions(body: GenerationBody, prompts: int, echo: bool) -> None:
    """Refuse predictions of an answer that is one of several, or begins with its prompt."""
    if not echo and prompts == 1:
        return
    why = "a prompt that is echoed" if echo else f"{prompts} prompts"
    if body.prediction is not None:
        raise bad_request(f"a prediction is for one prompt alone, not for {why}", "prediction")
    name = "drafts" if resume_of(body) is None else "resume"
    if _drafts(body) or name == "resume":
        raise bad_request(f"{name} is for one prompt alone, not for {why}", f"tpdet.{name}")


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops[:64]):
        raise RequestError("stop must be text or a list of texts", "stop")
    return tuple(stops)


def _form(body: GenerationBody) -> AnswerForm | None:
    """What the answer follows, by any of the names for it."""
    named = {name: getattr(body, name) for name in (FORM, *(f"guided_{kind}" for kind in OLDER))}
    schema, form = _json_schema(body.response_format), form_in(named)
    if schema is None:
        return form
    if form is not None:
        raise RequestError(f"response_format and {FORM} both give a form: send one of them", FORM)
    return AnswerForm("json_schema", schema)


def _json_schema(asked: ResponseFormat | None) -> str | None:
    """The schema as compact JSON text, its keys in the client's order; None for plain text."""
    if asked is None:
        return None
    if (asked.type == "json_schema") != (asked.json_schema is not None):
        raise RequestError(
            f"response_format of type {asked.type} "
            + ("lacks json_schema" if asked.json_schema is None else "takes no json_schema"),
            "response_format",
        )
    if asked.type == "text":
        return None
    schema = {"type": "object"} if asked.json_schema is None else asked.json_schema.schema_
    return schema_text(schema)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    found = {}
    for key, value in bias.items():
        canonical = key.isascii() and key.isdigit() and (key == "0" or key[0] != "0")
        if not canonical or len(key) > 10:
            raise RequestError(
                f"logit_bias key {key[:20]!r} is not a token id in canonical decimal", "logit_bias"
            )
        found[int(key)] = float(value)
    return found


def _check_size(field: str, value: str | None, limit: int) -> None:
    size = len((value or "").encode())
    if size > limit:
        raise bad_request(f"{field} has {size} bytes; the limit is {limit}", field)
