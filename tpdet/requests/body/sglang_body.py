"""The body of SGLang's `/generate`: the fields of a completion, by SGLang's names.

It becomes the body of a completion, so that everything is checked and prepared in one way.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from tpdet.requests.body import limits, schema
from tpdet.requests.body.idle_fields import IDLE
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.requests.field_ranges import ALTERNATIVES

DEFAULT_NEW_TOKENS = 128
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
"""SGLang's names of sampling parameters whose names differ."""
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "logit_bias",
)  # fmt: skip
_FORMS = {"json_schema": "json", "regex": "regex"}
_LISTED = (
    "sampling_params", "token_ids_logprob", "return_logprob", "logprob_start_len",
    "top_logprobs_num", "cache_salt", "extra_key", "return_hidden_states", "return_sampling_mask",
)  # fmt: skip
"""Fields that SGLang takes for each prompt by itself, in a list."""


class _SglangSamplingBase(schema.Body):
    """The idle fields of SGLang's sampling parameters, and the forms of an answer."""

    idle = IDLE["sglang_sampling"]
    json_schema: str | None = None
    regex: str | None = None


SglangSampling: Any = schema.with_fields(
    "SglangSampling",
    _SglangSamplingBase,
    "SGLang's sampling parameters.",
    {name: schema.CompletionBody.model_fields[NAMES.get(name, name)] for name in (*_SAME, *NAMES)},
)


@dataclass(frozen=True)
class SglangForm:
    """What an answer of SGLang's form holds beside its text and ids.

    single: it is one object, else a list of them. names: each prompt's id. start: the first prompt
    token that is scored, None for none. texts: log-probabilities have their tokens' texts.
    """

    single: bool
    names: tuple[str, ...]
    start: int | None
    texts: bool
    experts: bool
    prompt_ids: bool


class SglangBody(schema.Body):
    """`POST /generate`: one prompt or several, as text or as token ids."""

    idle = IDLE["sglang"]
    rid: str | list[str] | None = None
    text: Annotated[
        Any,
        WithJsonSchema({"anyOf": [schema.TEXT, schema.batch_of(schema.TEXT), {"type": "null"}]}),
    ] = None
    input_ids: Annotated[
        Any, WithJsonSchema({"anyOf": [schema.IDS, schema.batch_of(schema.IDS), {"type": "null"}]})
    ] = None
    sampling_params: SglangSampling = Field(default_factory=SglangSampling)
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs_num: schema.Alternatives | None = None
    token_ids_logprob: Annotated[schema.TokenIds, Field(max_length=ALTERNATIVES.high)] | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Annotated[int, Field(ge=0)] | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(max_length=limits.MAX_CACHE_SALT_BYTES)] | None = None
    session_id: str | None = None
    conversation_id: str | None = None
    routing_key: str | None = None
    tpdet: schema.OwnFields | None = None

    def completion(self) -> schema.CompletionBody:
        """The same request as a completion's body. Raises ApiError for a prompt that is none."""
        name = "text" if self.input_ids is None else "input_ids"
        prompt = getattr(self, name)
        if prompt is None or (self.text is not None and self.input_ids is not None):
            raise bad_request("send either text or input_ids", name)
        kind = str if name == "text" else int
        first = prompt[0] if isinstance(prompt, list) and prompt else prompt
        if type(first) is not kind and not (isinstance(first, list) and kind is int):
            raise bad_request(f"{name} must be {'text' if kind is str else 'ids'}, or a list", name)
        sampling = self.sampling_params
        values: dict[str, Any] = {
            NAMES.get(field, field): getattr(sampling, field)
            for field in sampling.model_fields_set
            if field not in _FORMS
        }
        values.setdefault("max_tokens", DEFAULT_NEW_TOKENS)
        forms = {_FORMS[f]: getattr(sampling, f) for f in _FORMS if getattr(sampling, f)}
        beside = (self.top_logprobs_num or 0) if self.return_logprob else None
        return schema.CompletionBody.model_construct(
            prompt=prompt,
            stream=self.stream,
            cache_salt=self.cache_salt,
            tpdet=self.tpdet,
            structured_outputs=forms or None,
            logprobs=beside,
            prompt_logprobs=None if self._start is None else beside,
            logprob_token_ids=self.token_ids_logprob if self.return_logprob else None,
            **values,
        )

    def form(self, request_id: str, prompts: int) -> SglangForm:
        """What the answer holds. Raises ApiError for names that are not one for each prompt."""
        single = isinstance(self.text, str) or (
            isinstance(self.input_ids, list) and type(self.input_ids[0]) is int
        )
        single = single and (getattr(self.sampling_params, "n", None) or 1) == 1
        if isinstance(self.rid, list):
            names = self.rid
        else:
            name = self.rid or request_id
            names = [name] if single else [f"{name}_{i}" for i in range(prompts)]
        if len(names) != prompts:
            raise bad_request(f"{len(names)} names in rid for {prompts} prompts", "rid")
        return SglangForm(
            single,
            tuple(names),
            self._start,
            bool(self.return_text_in_logprobs),
            bool(self.return_routed_experts),
            bool(self.return_prompt_token_ids),
        )

    @property
    def _start(self) -> int | None:
        start = self.logprob_start_len
        return None if not self.return_logprob or start is None or start < 0 else start


def with_one_value(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body, lists of one value for each prompt replaced by the value.

    Raises ApiError where the values differ: prompts of a call are sampled in one way.
    """
    single = dict(fields)
    for name in _LISTED:
        values = fields.get(name)
        if not isinstance(values, list) or not values:
            continue
        if name == "token_ids_logprob" and not isinstance(values[0], list):
            continue  # the ids of every prompt
        if any(value != values[0] for value in values):
            raise bad_request(
                f"{name} differs between the prompts: send those that differ as requests of "
                "their own",
                name,
                "not_supported",
            )
        single[name] = values[0]
    return single


def by_its_names(error: ApiError, prompt: str) -> ApiError:
    """The same refusal, about the fields that the client knows; `prompt` is one of them."""
    message, param = error.message, error.param
    names = {**NAMES, "logprob_start_len": "prompt_logprobs", prompt: "prompt"}
    for theirs, ours in names.items():
        if ours != "prompt":
            message = re.sub(rf"\b{ours}\b", theirs, message)
        param = theirs if param == ours else param
    param = "top_logprobs_num" if param == "logprobs" else param
    return error.reworded(message, param)
