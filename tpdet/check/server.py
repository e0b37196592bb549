"""Checks recorded answers by a running server: each is asked for again, with itself as drafts."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from tpdet.arguments.structured_outputs import form_in
from tpdet.check.answers import (
    BatchLine,
    BodyOverHttp,
    Line,
    check_same_choices,
    check_same_prompt,
)
from tpdet.client.connection import Connection
from tpdet.client.retries import ask
from tpdet.errors import DisagreementError, RequestError, TpdetError, UsageError
from tpdet.llm.recorded import (
    CHECKED_AT_ONCE,
    Difference,
    RecordedAnswer,
    RecordedChoice,
    first_difference,
)

_SAME_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop",
    "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip


def server_facts(connection: Connection) -> dict[str, Any]:
    """What `/server_info` says. Raises UsageError for a server that is approximate, or another."""
    facts: dict[str, Any] = connection.get("/server_info")
    if "contract" not in facts:
        raise UsageError(f"the server at {connection.url} names no contract: it is not of tpdet")
    if facts.get("arithmetic") == "approximate":
        raise UsageError("the server is approximate: no answer can be checked by it")
    return facts


def check_by_server(
    connection: Connection, model: str, lines: list[Line], facts: dict[str, Any]
) -> list[Difference | None]:
    """The first difference of each line. Raises what `Connection` raises."""
    for line in lines:
        for name, theirs in (("contract", line.origin.contract), ("weights", line.origin.weights)):
            if theirs != facts[name]:
                raise DisagreementError(
                    f"line {line.number} was computed with {name} {theirs}, and the server has "
                    f"{facts[name]}: check it by a server of the same"
                )

    def one(line: Line) -> Difference | None:
        path, body = _question(line)
        try:
            answer = ask(connection, path, {**body, "model": model})
        except RequestError as error:
            raise RequestError(f"line {line.number}: {error}", error.param) from None
        try:
            found = msgspec.convert(answer, BodyOverHttp)
        except msgspec.ValidationError as error:
            raise TpdetError(f"line {line.number}: the answer lacks ids: {error}") from None
        check_same_choices(line, len(found.choices))
        if isinstance(line.answer, BatchLine):
            recorded = line.answer.response.body.choices
            for theirs, ours in zip(recorded, found.choices, strict=True):
                check_same_prompt(line, theirs.prompt_token_ids, ours.prompt_token_ids)
        choices = [RecordedChoice(c.token_ids, c.logprob_bits) for c in found.choices]
        return first_difference(line.choices, choices)

    with ThreadPoolExecutor(CHECKED_AT_ONCE) as pool:
        return list(pool.map(one, lines))


def _question(line: Line) -> tuple[str, dict[str, Any]]:
    """The path and body that ask for a line's answer again."""
    answer = line.answer
    own: dict[str, Any] = {}
    if isinstance(answer, RecordedAnswer):
        params = answer.params
        after = params.json_schema_after or ()
        body: dict[str, Any] = {name: getattr(params, name) for name in _SAME_NAMES}
        body |= {"prompt": answer.prompt_token_ids, "seed": answer.seed}
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if not params.stop:
            del body["stop"]
        if params.json_schema is not None:
            schema = {"name": "recorded", "schema": json.loads(params.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if params.regex is not None:
            body["structured_outputs"] = {"regex": params.regex}
        path = "/v1/completions"
    else:
        path = answer.request.url
        left_out = (
            *("stream", "stream_options", "prediction", "logprobs", "top_logprobs"),
            "include_reasoning",
        )
        body = {k: v for k, v in answer.request.body.items() if k not in left_out}
        body["seed"] = answer.response.body.tpdet.seed
        after = answer.response.body.tpdet.json_schema_after
    wanted = body.get("response_format") or {}
    if wanted.get("type", "text") != "text" or form_in(body) is not None:
        own["json_schema_after"] = after
    one_prompt = isinstance(answer, RecordedAnswer) or _has_one_prompt(body)
    if one_prompt and not body.get("echo"):
        own["drafts"] = [choice.token_ids for choice in line.choices]
    body.pop("tpdet", None)
    return path, body | ({"tpdet": own} if own else {}) | {"return_token_ids": True}


def _has_one_prompt(body: dict[str, Any]) -> bool:
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or (bool(prompt) and isinstance(prompt[0], int))
