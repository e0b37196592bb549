"""Turns a checked body into requests for the engine; refuses what the engine cannot run.

Runs in the HTTP process, in a thread when the body is large. Needs no torch.
"""

import time
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import msgspec

from tpdet.audit.replay import VERSION
from tpdet.errors import RequestError
from tpdet.requests.answer_form import AnswerForm
from tpdet.requests.body import limits
from tpdet.requests.body.answer_size import check_answer_size
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.requests.body.prompts import BodyPrompt, BodyPrompts
from tpdet.requests.body.resume import (
    FIELD,
    ResumePoint,
    check_origin,
    resume_of,
)
from tpdet.requests.body.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    OwnFields,
    ResponseFormat,
    StreamOptions,
)
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import Request, SamplingParams, check_against_model, room_behind
from tpdet.requests.resumed import check_resumed_counts
from tpdet.requests.structured_outputs import FIELD as FORM
from tpdet.requests.structured_outputs import OLDER, form_in, schema_text
from tpdet.text.reasoning import ReasoningParser
from tpdet.text.tokenizer import Tokenizer, ending_ids

DEFAULT_COMPLETION_TOKENS = 16
_CONVERTED = ("max_tokens", "stop", "stop_token_ids", "logit_bias", "prompt_logprobs")
_PASSED_ON = [
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationBody.model_fields and name not in _CONVERTED
]
"""Fields whose name and meaning are those of `SamplingParams`."""


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
    `replay_version`: of the digest that the answer gets.
    """

    kind: Literal["completion", "chat"]
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

    @property
    def choices(self) -> int:
        """Choices of each prompt."""
        return self.requests[0].params.n

    def reasoning_first(self, parser: ReasoningParser, vocab_size: int) -> "Call":
        """The same, a chat's schema held behind its reasoning unless the body says otherwise.

        vocab_size: the model's; with marks outside of it no answer reasons.
        """
        (request, *more), params = self.requests, self.requests[0].params
        given = params.form is None or params.json_schema_after is not None
        if more or given or self.kind != "chat":
            return self
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

    def completion(self, body: CompletionBody, request_id: str) -> Call:
        """Requests of `POST /v1/completions`. Raises ApiError or RequestError."""
        self.check_model(body.model)
        scored = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scored = max(body.logprobs, scored or 0)
        max_tokens = _max_tokens(body)
        if max_tokens is None:
            max_tokens = DEFAULT_COMPLETION_TOKENS
        prompts = self.prompts.of_completion(body)
        size = _Size(max_tokens, body.logprobs, scored)
        return self._call(f"cmpl-{request_id}", body, prompts, size)

    def chat(self, body: ChatBody, request_id: str) -> Call:
        """The request of `POST /v1/chat/completions`. Raises ApiError or RequestError."""
        self.check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        prompt = self.prompts.of_chat(body)
        max_tokens = _max_tokens(body)
        if max_tokens is None:
            max_tokens = room_behind(len(prompt.token_ids), self.facts.max_model_len)
        shown = (body.top_logprobs or 0) if body.logprobs else None
        size = _Size(max_tokens, shown, body.prompt_logprobs)
        return self._call(f"chatcmpl-{request_id}", body, [prompt], size)

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
        group_id: str,
        body: CompletionBody | ChatBody,
        prompts: list[BodyPrompt],
        size: "_Size",
    ) -> Call:
        resume = resume_of(body)
        point = None
        if resume is not None:
            point = ResumePoint(FIELD, resume.contract, resume.weights)
            check_origin(point, self.facts)
        options = _stream_options(body)
        _check_size("user", body.user, limits.MAX_USER_BYTES)
        _check_size("cache_salt", body.cache_salt, limits.MAX_CACHE_SALT_BYTES)
        requests = tuple(
            self._request(f"{group_id}-{i}", body, prompt, size) for i, prompt in enumerate(prompts)
        )
        chat = isinstance(body, ChatBody)
        echo = isinstance(body, CompletionBody) and bool(body.echo)
        _check_predictions(body, len(requests), echo)
        check_answer_size(
            [len(prompt.token_ids) for prompt in prompts],
            body,
            repeats=1 if chat else body.n or 1,
            echo=echo,
            logprobs=size.logprobs,
            max_tokens=size.max_tokens,
        )
        return Call(
            kind="chat" if chat else "completion",
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
            resume=point,
            include_reasoning=not isinstance(body, ChatBody) or body.include_reasoning is not False,
            replay_version=_own(body).replay_version or VERSION,
        )

    def _request(
        self, request_id: str, body: GenerationBody, prompt: BodyPrompt, size: "_Size"
    ) -> Request:
        given = {name: getattr(body, name) for name in _PASSED_ON}
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


def _own(body: GenerationBody) -> OwnFields:
    return body.tpdet or OwnFields()


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
