"""The JSON bodies of the API as pydantic models, strict about types and unknown fields.

`null` means absent. The ranges of sampling fields are those that `SamplingParams` declares; what
spans fields is checked where a body becomes requests.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from tpdet.audit.replay import VERSIONS
from tpdet.kernels.inputs.row_params import PlainParams
from tpdet.requests import field_ranges
from tpdet.requests.body import limits
from tpdet.requests.body.idle_fields import IDLE, Idle, add_to_schema
from tpdet.requests.engine_facts import RAW_LOGPROBS, LogprobsMode
from tpdet.requests.sampling_params import RANGES
from tpdet.requests.tools import MAX_TOOLS, ToolUse, read_tools


def _within(allowed: field_ranges.FieldRange) -> Any:
    """A declared range, as pydantic checks and publishes it."""
    low, high = allowed.low, None if allowed.high == math.inf else allowed.high
    return Field(gt=low, le=high) if allowed.above_low else Field(ge=low, le=high)


Count = Annotated[int, _within(field_ranges.COUNT)]
# Without fail_fast a list of a million wrong values makes a million error objects.
TokenIds = Annotated[list[Annotated[int, _within(field_ranges.TOKEN_ID)]], Field(fail_fast=True)]
Alternatives = Annotated[int, _within(field_ranges.ALTERNATIVES)]
Penalty = Annotated[float, _within(field_ranges.PENALTY)]
LogitBias = Annotated[
    dict[str, Annotated[float, _within(field_ranges.LOGIT_BIAS)]],
    Field(max_length=field_ranges.MAX_LOGIT_BIAS_IDS),
]
_STOP = {"type": "string", "minLength": 1, "maxLength": field_ranges.MAX_STOP_BYTES}
_STOPS = {"type": "array", "maxItems": field_ranges.MAX_STOP_STRINGS, "items": _STOP}
StopStrings = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "null"}, _STOP, _STOPS]})]
TEXT = {"type": "string", "minLength": 1}
IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}


_NAMED = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
        },
    },
}
TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        _NAMED,
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["tools"],
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "minItems": 1, "items": _NAMED},
                    },
                },
            },
        },
    ]
}


def batch_of(prompt: dict[str, Any]) -> dict[str, Any]:
    """The schema of a list of prompts."""
    return {"type": "array", "minItems": 1, "maxItems": limits.MAX_BATCH_PROMPTS, "items": prompt}


Prompt = Annotated[Any, WithJsonSchema({"anyOf": [TEXT, IDS, batch_of(TEXT), batch_of(IDS)]})]


class Body(BaseModel):
    """Strict: no coercion, no unknown fields, finite numbers.

    `idle`: known fields of which only values that ask for nothing are taken. `readings`: what
    clients read out of an answer and send back, which is left out.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )
    idle: ClassVar[dict[str, Idle]] = {}
    readings: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The published schema, with the idle fields."""
        schema = handler.resolve_ref_schema(handler(core))
        add_to_schema(schema, cls.idle)
        return schema


def with_fields(
    name: str, base: type[Body], description: str, fields: Mapping[str, FieldInfo]
) -> Any:
    """A body that has fields of other bodies, by the names that they have here."""
    given: Any = {field: (info.annotation, info) for field, info in fields.items()}
    return create_model(name, __base__=base, __doc__=description, **given)


class StreamOptions(Body):
    """What a stream carries beside the choices; the statistics need `include_usage`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    idle = IDLE["stream_options"]


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
    idle = IDLE["response_format"]


class TextPart(Body):
    """One part of a message's content; text is the only kind."""

    idle = IDLE["text_part"]
    type: Literal["text"]
    text: str


class Prediction(Body):
    """OpenAI's guess of the answer's text: it may save steps and changes no bit."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]


SchemaOrText = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]})
]
StructuredOutputs = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "description": "The form of the answer by vLLM's names: one of these.",
            "properties": {
                "json": {"anyOf": [{"type": "object"}, {"type": "string"}]},
                "regex": {"type": "string", "minLength": 1},
                "choice": {"type": "array", "minItems": 1, "items": {"type": "string"}},
                "json_object": {"type": "boolean"},
            },
        }
    ),
]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{12}|[0-9a-f]{64})$")]
ChoicesIds = Annotated[list[TokenIds], Field(fail_fast=True)]


class Resume(Body):
    """An answer to go on with: what computes it, its seed, and the ids of each choice so far.

    `contract` and `weights` are whole, or the 12 digits that a system fingerprint shows.
    `logprobs_mode` is what the answer names.
    """

    contract: Digest
    weights: Digest
    seed: Annotated[int, _within(field_ranges.SEED)]
    choices: ChoicesIds
    logprobs_mode: LogprobsMode = RAW_LOGPROBS


class OwnFields(Body):
    """Fields that no other API has.

    `drafts` has for each choice ids that it may begin with. `json_schema_after`: the ids behind
    which `response_format` holds; [] for from the first token. `replay_version`: of the digest.
    `seeds`: one a prompt, in place of `seed`. `fitted`, of chats: what the model does not have is
    done without: `max_tokens` is cut to its context, a `reasoning_effort` that its template does
    not read is left out, and system messages stand where the template shows them.
    """

    drafts: ChoicesIds | None = None
    json_schema_after: TokenIds | None = None
    resume: Resume | None = None
    replay_version: Annotated[int, Field(ge=VERSIONS[0], le=VERSIONS[-1])] | None = None
    seeds: (
        Annotated[list[Annotated[int, _within(field_ranges.SEED)]], Field(fail_fast=True)] | None
    ) = None
    fitted: bool | None = None


class _FirstFields(Body):
    """What bodies of both routes begin with."""

    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, _within(RANGES["n"])] | None = None


def _number(allowed: field_ranges.FieldRange) -> Any:
    """A field of a declared range, as `create_model` takes it."""
    kind = int if isinstance(allowed.low, int) else float
    return (Annotated[kind, _within(allowed)] | None, None)


if TYPE_CHECKING:
    _FieldsOfRows = _FirstFields
else:
    _FieldsOfRows = create_model(
        "_FieldsOfRows",
        __base__=_FirstFields,
        **{name: _number(RANGES[name]) for name in RANGES if name in PlainParams._fields},
    )


class GenerationBody(_FieldsOfRows):
    """The fields completions and chat share."""

    idle = IDLE["generation"]
    seed: Annotated[int, _within(field_ranges.SEED)] | None = None
    stop: StopStrings = None
    stop_token_ids: TokenIds | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: LogitBias | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, _within(RANGES["repetition_penalty"])] | None = None
    user: str | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    logprob_token_ids: (
        Annotated[TokenIds, Field(max_length=field_ranges.ALTERNATIVES.high)] | None
    ) = None
    prompt_logprobs: Alternatives | None = None
    prompt_logprobs_last_n: Annotated[int, _within(RANGES["prompt_logprobs_last_n"])] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    prediction: Prediction | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    tpdet: OwnFields | None = None


# Of the openai client's `parse`; of LiteLLM, which keeps there what else an answer has.
_READINGS = ("parsed", "parsed_arguments", "provider_specific_fields")


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    idle = IDLE["completion"]
    prompt: Prompt
    logprobs: Alternatives | None = None
    echo: bool | None = None


class CalledFunction(Body):
    """The function that a tool call names; `arguments` is a JSON object, as text or as it is."""

    readings = _READINGS
    name: Annotated[str, Field(max_length=limits.MAX_NAME_CHARACTERS)]
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """A tool call in the history; `index` is what the pieces of a stream have."""

    id: Annotated[str, Field(max_length=limits.MAX_NAME_CHARACTERS)] | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = None


class ChatMessage(Body):
    """One message of a conversation; `type` is what lm-eval puts beside each message's content.

    `content` may be null where an assistant's message has tool calls. `reasoning` and
    `reasoning_content` are two names of one field.
    """

    idle, readings = IDLE["message"], _READINGS
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=limits.MAX_NAME_CHARACTERS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=limits.MAX_NAME_CHARACTERS)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    type: Literal["text"] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class DeclaredFunction(Body):
    """A function that may be called; `parameters` is a JSON schema of an object.

    `strict`: the arguments of a call follow it; those of a call that has to come always do.
    """

    name: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARACTERS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class DeclaredTool(Body):
    """A tool; functions are the only kind."""

    idle = IDLE["cache_control"]
    type: Literal["function"]
    function: DeclaredFunction


class ToolFields(Body):
    """The tools of a conversation; `tool_choice` says which may, or have to, be called."""

    tools: Annotated[list[DeclaredTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = None

    def tool_use(self, parallel: bool | None = None) -> ToolUse | None:
        """How the tools are used; None where none are. Raises RequestError."""
        declared = [
            {"type": tool.type, "function": dict(tool.function)} for tool in self.tools or ()
        ]
        return read_tools(declared, self.tool_choice, parallel)


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(ToolFields, GenerationBody):
    """`POST /v1/chat/completions`."""

    idle = IDLE["chat"]
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None


class TokenizeBody(ToolFields):
    """`POST /tokenize`: a prompt or a conversation, one of the two."""

    idle = IDLE["conversation"]
    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None
    tokens: TokenIds
