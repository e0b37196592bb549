"""Checks recorded answers by a running server: each is asked for again, with itself as drafts."""

import argparse
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from tpdet.audit.recorded import RecordedAnswer, RecordedChoice, check_mode, tokens_of
from tpdet.audit.replay import COVERED
from tpdet.client.commands import connect
from tpdet.client.connection import Connection
from tpdet.errors import CheckpointError, DisagreementError, RequestError, TpdetError, UsageError
from tpdet.llm.recorded import CHECKED_AT_ONCE
from tpdet.requests.engine_facts import RAW_LOGPROBS
from tpdet.requests.routes import CHATS, COMPLETIONS, MESSAGES
from tpdet.requests.structured_outputs import form_in
from tpdet.tools.check.answers import (
    BatchLine,
    Line,
    Question,
    asked_body,
    bare_choice,
    body_over_http,
    check_same_choices,
    check_same_prompt,
)
from tpdet.tools.check.computed import Compared, batch_line, compare_line, offline_line
from tpdet.tools.check.report import Checked

_SAME_NAMES = (*COVERED, "ignore_eos")
"""Parameters that have one name in a record and in a body."""

_SAME_OUTPUTS = ("index", "token_ids", "logprob_bits", "finish_reason", "stop_reason")


def check_by_server(
    options: argparse.Namespace, lines: list[Line]
) -> tuple[list[Compared], Checked]:
    """What the server that the flags name finds.

    Raises what `Connection` raises, UsageError for a server that is approximate or another's,
    DisagreementError for answers of another contract, other weights or another form.
    """
    connection = connect(options)
    facts = server_facts(connection)
    begin = time.monotonic()
    compared = compare_by_server(connection, lines, facts)
    names = facts["contract"], facts["weights"], facts["system_fingerprint"]
    return compared, Checked.of(*names, compared, time.monotonic() - begin)


def server_facts(connection: Connection) -> dict[str, Any]:
    """What `/server_info` says. Raises UsageError for a server that is approximate, or another."""
    facts: dict[str, Any] = connection.get("/server_info")
    if "contract" not in facts:
        raise UsageError(f"the server at {connection.url} names no contract: it is not of tpdet")
    if facts.get("arithmetic") == "approximate":
        raise UsageError("the server is approximate: no answer can be checked by it")
    return facts


def compare_by_server(
    connection: Connection, lines: list[Line], facts: dict[str, Any]
) -> list[Compared]:
    """Each line against the server's answer. Raises what `Connection` raises."""
    for line in lines:
        _refuse_other(line, facts)

    def one(line: Line) -> Compared:
        path, body = _question(line)
        try:
            answer = connection.post_patiently(path, {**body, "model": facts["model"]})
        except RequestError as error:
            raise RequestError(f"{line.where}: {error}", error.param) from None
        return _compared(line, answer, facts)

    with ThreadPoolExecutor(CHECKED_AT_ONCE) as pool:
        return list(pool.map(one, lines))


def record_by_server(
    connection: Connection, questions: Sequence[Question], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """The answers, as lines of `run-batch --record`. Raises what `Connection` raises."""

    def one(question: Question) -> dict[str, Any]:
        body = {"model": facts["model"], **question.seeded_body}
        try:
            return question.line(connection.post_patiently(question.url, body))
        except RequestError as error:
            raise RequestError(f"{question.name}: {error}", error.param) from None

    with ThreadPoolExecutor(CHECKED_AT_ONCE) as pool:
        return list(pool.map(one, questions))


def _refuse_other(line: Line, facts: dict[str, Any]) -> None:
    """Refuse a line that this server cannot compute, or cannot show as it was shown."""
    for name, theirs in (("contract", line.origin.contract), ("weights", line.origin.weights)):
        if theirs != facts[name]:
            raise DisagreementError(
                f"{line.where} was computed with {name} {theirs}, and the server has "
                f"{facts[name]}: check it by a server of the same"
            )
    here = facts.get("logprobs_mode", RAW_LOGPROBS)
    check_mode(line.origin.logprobs_mode, here, line.where)
    answer = line.answer
    if isinstance(answer, RecordedAnswer):
        for name in ("logprobs", "prompt_logprobs", "tool_calls"):
            if getattr(answer.params, name) is not None:
                raise CheckpointError(
                    f"{line.where} has {name} {getattr(answer.params, name)!s:.80}, which no "
                    "server shows in that form: check it by its model, tpdet check MODEL"
                )
        schema = answer.params.json_schema
        if schema is not None and schema != _as_sent(schema):
            raise CheckpointError(
                f"{line.where} has a schema that is not compact JSON, as servers read it: "
                "check it by its model, tpdet check MODEL"
            )
        return
    splits = facts.get("reasoning_parser", "off") != "off"
    if answer.request.url in (CHATS, MESSAGES) and splits != line.is_split:
        theirs, ours = ("with", "without") if line.is_split else ("without", "with")
        raise DisagreementError(
            f"{line.where} was made {theirs} a reasoning parser, and the server runs {ours} "
            "one: check it by its model, tpdet check MODEL"
        )


def _compared(line: Line, answer: dict[str, Any], facts: dict[str, Any]) -> Compared:
    try:
        body = body_over_http(answer)
    except msgspec.ValidationError as error:
        raise TpdetError(f"{line.where}: the answer lacks ids: {error}") from None
    check_same_choices(line, len(body.choices))
    choices, recorded = [*map(bare_choice, body.choices)], line.answer
    if isinstance(recorded, BatchLine):
        for theirs, ours in zip(recorded.response.body.choices, body.choices, strict=True):
            check_same_prompt(line, theirs.prompt_token_ids, ours.prompt_token_ids)
        return compare_line(line, choices, batch_line(line, answer))
    for choice in body.choices:
        check_same_prompt(line, recorded.prompt_token_ids, choice.prompt_token_ids)
    answered = _offline_answer(line, recorded, answer, facts)
    return compare_line(line, choices, offline_line(line, answered))


def _offline_answer(
    line: Line, recorded: RecordedAnswer, answer: dict[str, Any], facts: dict[str, Any]
) -> dict[str, Any]:
    """The fields of a line of `tpdet generate`, of what a server answers to the same request."""
    answered = {name: facts[name] for name in ("contract", "weights")} | {
        "seed": recorded.seed,
        "prompt_token_ids": list(recorded.prompt_token_ids),
        "replay_digest": answer["tpdet"]["replay_digest"],
        "replay_version": answer["tpdet"]["replay_version"],
        "request_digest": answer["tpdet"].get("request_digest"),
        "logprobs_mode": answer["tpdet"].get("logprobs_mode", RAW_LOGPROBS),
        "outputs": [_offline_choice(recorded, choice) for choice in answer["choices"]],
    }
    if line.is_bare:
        ids = ("token_ids", "logprob_bits")
        answered["outputs"] = [{name: one[name] for name in ids} for one in answered["outputs"]]
        return answered
    shown = {"request_id": None, "prompt_logprobs": None, "prompt_routed_experts": None}
    return answered | shown | {"finished": True, "system_fingerprint": answer["system_fingerprint"]}


def _offline_choice(recorded: RecordedAnswer, choice: dict[str, Any]) -> dict[str, Any]:
    tokens = tokens_of(RecordedChoice(choice["token_ids"], choice["logprob_bits"]))
    total = math.fsum([token.logprob for token in tokens])
    return {name: choice[name] for name in _SAME_OUTPUTS} | {
        "text": choice["text"] if recorded.params.detokenize else "",
        "cumulative_logprob": total if math.isfinite(total) else None,
        "logprobs": None,
        "routed_experts": choice.get("routed_experts"),
    }


def _question(line: Line) -> tuple[str, dict[str, Any]]:
    """The path and body that ask for a line's answer again."""
    answer = line.answer
    own: dict[str, Any] = {}
    if isinstance(answer, RecordedAnswer):
        path, body = COMPLETIONS, _offline_body(line, answer)
        after: Any = answer.params.json_schema_after or ()
        version = answer.replay_version
    else:
        path, body = answer.request.url, asked_body(line, answer)
        recorded_origin = answer.response.body.tpdet
        after, version = recorded_origin.json_schema_after, recorded_origin.replay_version
        if recorded_origin.seeds:
            own["seeds"] = recorded_origin.seeds
    if _has_form(body) or (after and body.get("tools")):
        own["json_schema_after"] = after
    one_prompt = isinstance(answer, RecordedAnswer) or _has_one_prompt(body)
    if one_prompt and not body.get("echo"):
        own["drafts"] = [choice.token_ids for choice in line.choices]
    own["replay_version"] = version
    return path, body | {"tpdet": own, "return_token_ids": True}


def _has_form(body: dict[str, Any]) -> bool:
    """Whether a body of any route asks for a form of its answer."""
    inner = [(body.get(name) or {}).get("format") for name in ("output_config", "text")]
    formats = [body.get("response_format"), *inner]
    formed = any((one or {}).get("type", "text") != "text" for one in formats)
    return formed or form_in(body) is not None


def _offline_body(line: Line, answer: RecordedAnswer) -> dict[str, Any]:
    """What asks a server for an answer of `tpdet generate`; a prompt that was text is text."""
    params, text = answer.params, line.fields.get("prompt")
    body: dict[str, Any] = {name: getattr(params, name) for name in _SAME_NAMES}
    body["prompt"] = text if isinstance(text, str) else answer.prompt_token_ids
    body["seed"] = answer.seed
    body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if not params.stop:
        del body["stop"]
    if params.json_schema is not None:
        schema = {"name": "recorded", "schema": json.loads(params.json_schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if params.regex is not None:
        body["structured_outputs"] = {"regex": params.regex}
    return body


def _as_sent(schema: str) -> str | None:
    """A schema in the form in which a server's digest covers it; None for no JSON."""
    try:
        return json.dumps(json.loads(schema), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return None


def _has_one_prompt(body: dict[str, Any]) -> bool:
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or (bool(prompt) and isinstance(prompt[0], int))
