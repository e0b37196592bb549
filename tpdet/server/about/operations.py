"""Summaries and descriptions of the API's operations, for the schema and the page."""

from typing import NamedTuple


class Operation(NamedTuple):
    """A short summary, and the content of an answer."""

    summary: str
    description: str


OPERATIONS = {
    "/v1/chat/completions": Operation(
        "Continue a conversation",
        "The next message of a conversation, whole or as a stream of server-sent events.",
    ),
    "/v1/completions": Operation(
        "Complete a prompt",
        "Text for one prompt or several, given as text or token ids. With echo, logprobs and "
        "max_tokens 0 the prompts are scored.",
    ),
    "/v1/models": Operation(
        "List the models", "The one model that is served, with the length of its context."
    ),
    "/v1/models/{model_id}": Operation(
        "Describe a model", "The served model by its name; 404 for any other."
    ),
    "/tokenize": Operation(
        "Turn text into token ids", "Token ids of a prompt, or of a conversation by its template."
    ),
    "/detokenize": Operation("Turn token ids into text", "The text of token ids."),
    "/tokenizer_info": Operation(
        "Describe the tokenizer", "Its special tokens and its chat template; 404 without one."
    ),
    "/server_info": Operation(
        "Describe the server",
        "Model, system fingerprint, state, context, vocabulary, ranks and every limit.",
    ),
    "/health": Operation(
        "Is the engine alive?", "200 while the engine makes progress, else 503 with the reason."
    ),
    "/ready": Operation(
        "Are requests taken?", "200 while requests are taken, else 503 with the reason as its code."
    ),
    "/metrics": Operation("Metrics for Prometheus", "The text exposition format, version 0.0.4."),
    "/version": Operation("Version", "The version, and whether arithmetic is strict."),
    "/openapi.json": Operation("The schema", "All of this as an OpenAPI document."),
    "/": Operation("The page for browsers", "Routes, limits and a first request to copy."),
    "/docs": Operation("The page for browsers", "The same page as at the path /."),
}

# Paths of other servers: what to use here instead.
ELSEWHERE = {
    "/v1/responses": "the Responses API is not served: use /v1/chat/completions",
    "/v1/messages": "the Messages API is not served: use /v1/chat/completions",
    "/v1/embeddings": "no embeddings are made here, only text: use a server of an embedding model",
    "/v1/rerank": "nothing is ranked here: score prompts with /v1/completions, echo and logprobs",
    "/v1/score": "nothing is ranked here: score prompts with /v1/completions, echo and logprobs",
    "/v1/audio/transcriptions": "text is the only kind of content here",
    "/v1/images/generations": "text is the only kind of content here",
    "/v1/batches": "there are no batch files: send a list of prompts to /v1/completions",
    "/v1/files": "no files are kept: send a list of prompts to /v1/completions",
    "/v1/moderations": "nothing is moderated here",
    "/v1": "it is what clients take as base URL: they add /chat/completions, /completions, /models",
    "/chat/completions": "the path begins with /v1: use /v1/chat/completions",
    "/completions": "the path begins with /v1: use /v1/completions",
    "/models": "the path begins with /v1: use /v1/models",
    "/api/tags": "Ollama's API is not served: use /v1/models",
    "/api/chat": "Ollama's API is not served: use /v1/chat/completions",
    "/api/generate": "Ollama's API is not served: use /v1/completions",
    "/generate": "use /v1/completions",
    "/invocations": "use /v1/completions or /v1/chat/completions",
    "/ping": "use /health",
    "/healthz": "use /health",
    "/load": "use /metrics: tpdet_requests_running and tpdet_requests_waiting",
    "/redoc": "use /docs",
}


LONGEST = 4  # segments of a path here or in ELSEWHERE, at most


def not_found(path: str) -> str:
    """The message of a 404 for a path.

    A wrong base URL leaves the path that was meant at the end: after /v1 twice, two slashes,
    another server's prefix, or with a slash behind it.
    """
    parts = [part for part in path.split("/") if part][-LONGEST:]
    for begin in range(len(parts)):
        meant = "/" + "/".join(parts[begin:])
        if meant in OPERATIONS:
            return f"there is nothing at this path: use {meant}"
        if meant in ELSEWHERE:
            return f"there is nothing at this path: {ELSEWHERE[meant]}"
    return (
        "there is nothing at this path: GET /openapi.json lists what there is, GET /v1/models the "
        "model, and a browser shows both at /docs"
    )
