"""All work on a request's body, by route; it needs the tokenizer and no event loop.

The HTTP process calls it for small bodies, and a worker process for large ones.
"""

from typing import Any, cast

from tpdet.requests.answer.json_pieces import to_json
from tpdet.requests.body import parse
from tpdet.requests.body.messages_body import CountTokensBody, MessagesBody, MessagesChat
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.pooling.pooling_body import PooledCall, bodies_of, pooled_call
from tpdet.requests.body.prepare import Call, Preparer
from tpdet.requests.body.problems import bad_request, request_errors_as_problems
from tpdet.requests.body.responses_body import ResponsesBody
from tpdet.requests.body.schema import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tpdet.requests.body.sglang_body import SglangBody, by_its_names, with_one_value
from tpdet.requests.body.token_bodies import TokensBody
from tpdet.requests.pooling_params import ONLY_POOLED
from tpdet.requests.routes import CALLS, POOLED, PooledRoute, Route

BODIES: dict[Route, tuple[type[Body], ...]] = {
    **{route: (body,) for route, body in parse.BODIES.items()},
    "messages": (MessagesBody,),
    "count_tokens": (CountTokensBody,),
    **{route: bodies_of(route) for route in POOLED},
}
"""The body of each route, of some one of several."""


def prepare_call(route: Route, preparer: Preparer, fields: dict[str, Any], request_id: str) -> Call:
    """The engine's part of a request for tokens. Raises ApiError."""
    if preparer.facts.pooling is not None:
        task = preparer.facts.pooling.task
        raise bad_request(ONLY_POOLED.format(task), None, "not_supported")
    if route == "sglang":
        return _sglang_call(preparer, fields, request_id)
    with request_errors_as_problems():
        if route == "completion":
            return preparer.completion(parse_body(CompletionBody, fields), request_id)
        if route == "tokens":
            return preparer.tokens(parse_body(TokensBody, fields), request_id)
        if route == "messages":
            return preparer.messages(parse_body(MessagesBody, fields), request_id)
        if route == "responses":
            return preparer.responses(parse_body(ResponsesBody, fields), request_id)
        return preparer.chat(parse_body(ChatBody, fields), request_id)


def _sglang_call(preparer: Preparer, fields: dict[str, Any], request_id: str) -> Call:
    """The call of SGLang's body; a refusal names the fields as that body does."""
    prompt = "text" if fields.get("input_ids") is None else "input_ids"
    with request_errors_as_problems(lambda error: by_its_names(error, prompt)):
        return preparer.sglang(parse_body(SglangBody, with_one_value(fields)), request_id)


def work_on(
    route: Route, preparer: Preparer, fields: dict[str, Any], request_id: str
) -> Call | PooledCall | bytes:
    """A body's call; on a route that needs no engine its answer as JSON. Raises ApiError."""
    if route in POOLED:
        return pooled_call(cast(PooledRoute, route), preparer, fields, request_id)
    if route in CALLS:
        return prepare_call(route, preparer, fields, request_id)
    with request_errors_as_problems():
        return to_json(_ANSWERS[route](preparer, fields))


def _tokenized(preparer: Preparer, fields: dict[str, Any]) -> dict[str, Any]:
    body = parse_body(TokenizeBody, fields)
    preparer.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either prompt or messages", "prompt")
    special = body.add_special_tokens
    if body.messages is not None:
        tokens = preparer.prompts.chat_tokens(body)
    else:
        tokens = preparer.prompts.text_tokens(
            body.prompt or "", True if special is None else special, "prompt"
        )
    found = {"tokens": tokens, "count": len(tokens), "max_model_len": preparer.facts.max_model_len}
    if body.return_token_strs:
        tokenizer = preparer.prompts.need_tokenizer("return_token_strs")
        found["token_strs"] = [tokenizer.names.name(token) for token in tokens]
    return found


def _detokenized(preparer: Preparer, fields: dict[str, Any]) -> dict[str, Any]:
    body = parse_body(DetokenizeBody, fields)
    preparer.check_model(body.model)
    tokenizer = preparer.prompts.need_tokenizer("tokens")
    vocabulary = preparer.facts.vocab_size
    for token in body.tokens:
        if token >= vocabulary:
            raise bad_request(
                f"token id {token} is outside the vocabulary [0, {vocabulary})", "tokens"
            )
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _counted(preparer: Preparer, fields: dict[str, Any]) -> dict[str, Any]:
    """How long the prompt of a message is."""
    body = parse_body(CountTokensBody, fields)
    preparer.check_model(body.model)
    chat = MessagesChat(body)
    with request_errors_as_problems(chat.refused):
        tokens = preparer.prompts.chat_tokens(parse_body(ChatBody, chat.fields))
    return {"input_tokens": len(tokens)}


_ANSWERS = {"tokenize": _tokenized, "detokenize": _detokenized, "count_tokens": _counted}
"""What answers on routes that need no engine."""
