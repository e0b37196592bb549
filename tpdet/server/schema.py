"""The JSON bodies of the API: types and unknown fields are refused here, strictly.

`null` means absent. Ranges are repeated from `tpdet.request` for the published schema's sake;
what spans fields is checked where a body becomes requests.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from tpdet import request as bounds
from tpdet.server import limits

Integer = Annotated[int, Field(ge=0, le=2**31 - 1)]
# Without fail_fast a list of a million wrong values makes a million error objects.
Integers = Annotated[list[Integer], Field(fail_fast=True)]
TopLogprobs = Annotated[int, Field(ge=0, le=bounds.MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
StopStrings = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {"type": "string", "minLength": 1, "maxLength": bounds.MAX_STOP_BYTES},
                {
                    "type": "array",
                    "maxItems": bounds.MAX_STOP_STRINGS,
                    "items": {
                        "type": "string",
                        "minLength": 1,
                        "maxLength": bounds.MAX_STOP_BYTES,
                    },
                },
            ]
        }
    ),
]
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                _IDS,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": limits.MAX_BATCH_PROMPTS,
                    "items": {"type": "string", "minLength": 1},
                },
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": limits.MAX_BATCH_PROMPTS,
                    "items": _IDS,
                },
            ]
        }
    ),
]


class Body(BaseModel):
    """Strict: no coercion, no unknown fields, finite numbers."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Body):
    """What a stream carries beside the choices."""

    include_usage: bool | None = None


class JsonSchema(Body):
    """OpenAI's wrapper of a schema; `strict` makes no difference, every schema is followed."""

    name: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARACTERS)]
    description: Annotated[str, Field(max_length=limits.MAX_DESCRIPTION_CHARACTERS)] | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Plain text, any JSON object, or JSON that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationBody(Body):
    """The fields completions and chat share."""

    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    n: Annotated[int, Field(ge=1, le=bounds.MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=bounds.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=bounds.MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=0, le=bounds.MAX_SEED)] | None = None
    stop: StopStrings = None
    stop_token_ids: Integers | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: (
        Annotated[
            dict[
                str,
                Annotated[
                    float,
                    Field(ge=-limits.MAX_LOGIT_BIAS_MAGNITUDE, le=limits.MAX_LOGIT_BIAS_MAGNITUDE),
                ],
            ],
            Field(max_length=bounds.MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0)] | None = None
    user: str | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = None
    prompt_logprobs: TopLogprobs | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: TopLogprobs | None = None
    echo: bool | None = None


class TextPart(Body):
    """One part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message of a conversation; `type` is what lm-eval puts beside each message's content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: Annotated[str, Field(max_length=limits.MAX_NAME_CHARACTERS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=limits.MAX_NAME_CHARACTERS)] | None = None
    type: Literal["text"] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt or a conversation, one of the two."""

    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None
    tokens: Integers
