"""The routes whose bodies ask for a model's text, ids or numbers, and the paths of each.

Whoever names such a path takes it from here: both doors, the published schema, receipts, tools.
All are asked by POST. A route's first path is the one that it is named by.
"""

from typing import Literal, get_args

CallRoute = Literal["chat", "completion", "messages", "responses", "tokens", "sglang"]
PooledRoute = Literal[
    "embeddings",
    "classify",
    "pooling",
    "score",
    "rerank",
    "embed",
    "predict",
    "similarity",
    "inputs",
]
TextRoute = Literal["count_tokens", "tokenize", "detokenize"]
Route = Literal[CallRoute, PooledRoute, TextRoute]
CALLS, POOLED = get_args(CallRoute), get_args(PooledRoute)
"""The routes whose bodies are calls of the engine, for tokens and for numbers."""

CALL_PATHS: dict[str, CallRoute] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/inference/v1/generate": "tokens",
    "/generate": "sglang",
}
POOLED_PATHS: dict[str, PooledRoute] = {
    "/v1/embeddings": "embeddings",
    "/classify": "classify",
    "/pooling": "pooling",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/embed": "embed",
    "/predict": "predict",
    "/similarity": "similarity",
    "/": "inputs",
}
TEI_PATHS = ("/embed", "/predict", "/similarity", "/info")
"""Those of text-embeddings-inference alone; of / and /rerank a body says whose it is."""
TEXT_PATHS: dict[str, TextRoute] = {
    "/v1/messages/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
PATHS: dict[str, Route] = {**CALL_PATHS, **POOLED_PATHS, **TEXT_PATHS}


def path_of(route: Route) -> str:
    """The path that a route is named by."""
    return next(path for path, known in PATHS.items() if known == route)


CHATS, COMPLETIONS = path_of("chat"), path_of("completion")
MESSAGES, RESPONSES = path_of("messages"), path_of("responses")
RECORDED: dict[str, CallRoute] = {
    path: CALL_PATHS[path] for path in (CHATS, COMPLETIONS, MESSAGES, RESPONSES)
}
"""Those whose answers can be computed again from what a client has of them, as batches' can."""
TEMPLATED = (CHATS, MESSAGES, RESPONSES)
"""Those of them whose prompts a chat template makes."""
