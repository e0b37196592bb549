"""A parsed JSON object as one of the schema's bodies, or the first thing wrong with it."""

from typing import Any, TypeVar

from pydantic import ValidationError

from tpdet.request import MAX_LOGIT_BIAS
from tpdet.server.problems import ApiError, bad_request
from tpdet.server.schema import Body, ChatMessage, TextPart

# Fields of OpenAI's API and of vLLM's that are known and not supported, so that the refusal can
# say so; any other unknown field is refused as unknown.
NOT_SUPPORTED = frozenset(
    [
        "add_generation_prompt",
        "allowed_token_ids",
        "annotations",
        "audio",
        "bad_words",
        "best_of",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "function_call",
        "functions",
        "guided_choice",
        "guided_decoding_backend",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "length_penalty",
        "logits_processors",
        "metadata",
        "mm_processor_kwargs",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_embeds",
        "reasoning_content",
        "reasoning_effort",
        "refusal",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "structured_outputs",
        "suffix",
        "tool_calls",
        "tool_choice",
        "tools",
        "use_beam_search",
        "verbosity",
        "web_search_options",
    ]
)

Parsed = TypeVar("Parsed", bound=Body)


def parse_body(model: type[Parsed], body: dict[str, Any]) -> Parsed:
    """The body as its model. Raises ApiError 400 naming the first field that is wrong."""
    given = _known(model, body)
    bias = given.get("logit_bias")
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise bad_request(
            f"logit_bias has {len(bias)} ids; the limit is {MAX_LOGIT_BIAS}", "logit_bias"
        )
    if isinstance(given.get("messages"), list):
        given["messages"] = [_known_message(message) for message in given["messages"]]
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _first_problem(error) from None


def _known(model: type[Body], body: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given, each of them known; pydantic would list every unknown one."""
    for name, value in body.items():
        if name in model.model_fields:
            continue
        if name not in NOT_SUPPORTED:
            raise _unknown(name)
        if value is not None:
            raise bad_request(f"{name} is not supported: leave it out", name, "not_supported")
    return {name: value for name, value in body.items() if value is not None}


def _known_message(message: Any) -> Any:
    """A message with its known fields, its parts text; what has another shape is left alone."""
    if not isinstance(message, dict):
        return message
    message = _known(ChatMessage, message)
    if isinstance(message.get("content"), list):
        message["content"] = [_known_part(part) for part in message["content"]]
    return message


def _known_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if isinstance(kind, str) and kind != "text":
        raise bad_request(
            f"content parts of type {kind[:40]!r} are not supported: send text", "messages"
        )
    return _known(TextPart, part)


def _first_problem(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_context=False)[0]
    place = [part for part in problem["loc"] if not _is_branch(part)]
    param = str(place[0]) if place else None
    if problem["type"] == "extra_forbidden":
        return _unknown(".".join(str(part) for part in problem["loc"]))
    if problem["type"] == "missing":
        return bad_request(f"{'.'.join(map(str, place))} is missing", param)
    where = ".".join(str(part) for part in place)
    shown = _shown(problem["input"])
    return bad_request(f"{where}: {problem['msg']}" + (f", not {shown}" if shown else ""), param)


def _is_branch(part: int | str) -> bool:
    """Whether a location names a branch of a union rather than a field."""
    return isinstance(part, str) and ("[" in part or part in ("str", "TextPart"))


def _shown(value: object) -> str:
    """A scalar as it stood in the JSON, shortened; nothing for what has structure."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)[:40] if not isinstance(value, int) or value.bit_length() < 200 else ""
    return repr(value)[:60] if isinstance(value, str) else ""


def _unknown(name: str) -> ApiError:
    return bad_request(f"unknown field {name!r}: leave it out", name, "unknown_field")
