"""Summaries and descriptions of the API's operations, for the schema and the page."""

from typing import NamedTuple

from tpdet.requests.routes import PATHS, Route, path_of


class Operation(NamedTuple):
    """A short summary, and the content of an answer."""

    summary: str
    description: str


_OF_ROUTES: dict[Route, Operation] = {
    "chat": Operation(
        "Continue a conversation",
        "The next message of a conversation, whole or as a stream of server-sent events.",
    ),
    "completion": Operation(
        "Complete a prompt",
        "Text for one prompt or several, given as text or token ids. With echo, logprobs and "
        "max_tokens 0 the prompts are scored.",
    ),
    "messages": Operation(
        "Answer, in Anthropic's form",
        "The next message of a conversation as content blocks, whole or as typed events.",
    ),
    "responses": Operation(
        "Answer, in the Responses form",
        "The items that follow a conversation of items, whole or as typed events: OpenAI's "
        "Responses API, without state.",
    ),
    "tokens": Operation(
        "Continue token ids",
        "Token ids in, token ids out, with log-probabilities and ranks: vLLM's form for RL.",
    ),
    "sglang": Operation(
        "Generate, in SGLang's form",
        "Text and token ids for one prompt or several, with the facts of each in meta_info.",
    ),
    "embeddings": Operation(
        "Embed texts", "A vector for each text or list of token ids, of a model that embeds."
    ),
    "classify": Operation("Classify texts", "The probabilities of a score head's labels."),
    "pooling": Operation("Pool texts", "Vectors, labels or rewards, as the model has them."),
    "score": Operation(
        "Score pairs",
        "How well texts fit texts, by a model that reads both, or as cosines of vectors.",
    ),
    "rerank": Operation("Rank documents", "Documents by how well they fit a query, best first."),
    "embed": Operation(
        "Embed texts, in TEI's form", "Vectors alone, of text-embeddings-inference."
    ),
    "predict": Operation(
        "Classify texts, in TEI's form", "Each text's labels with their scores, the best first."
    ),
    "similarity": Operation(
        "Compare sentences, in TEI's form", "Cosines of one sentence's vector and each other's."
    ),
    "inputs": Operation(
        "Ask for what the model has, in TEI's form",
        "Vectors, labels, cosines or ranks, by the body: where Hugging Face's clients send them.",
    ),
    "count_tokens": Operation(
        "Count a prompt's tokens", "How long the prompt of such a message would be."
    ),
    "tokenize": Operation(
        "Turn text into token ids", "Token ids of a prompt, or of a conversation by its template."
    ),
    "detokenize": Operation("Turn token ids into text", "The text of token ids."),
}


def _of_path(path: str, route: Route) -> Operation:
    named, first = _OF_ROUTES[route], path_of(route)
    return named if path == first else named._replace(description=f"Another name of {first}.")


CALL_OPERATIONS = {path: _of_path(path, route) for path, route in PATHS.items()}
"""Those that ask for a model's text, ids or numbers, by POST."""
OPERATIONS = {
    **CALL_OPERATIONS,
    "/v1/answers/{request_digest}": Operation(
        "Get an answer again",
        "A cached answer, as ids and bits, by its request digest; 404 without --answer-cache.",
    ),
    "/v1/models": Operation(
        "List the models", "The one model that is served, with the length of its context."
    ),
    "/v1/models/{model_id}": Operation(
        "Describe a model", "The served model by its name; 404 for any other."
    ),
    "/v1/receipts/{receipt_id}": Operation(
        "Get a receipt",
        "The signed receipt of an answer of one's own, with its proof, and its content unless it "
        "was erased; only where receipts are made.",
    ),
    "/tokenizer_info": Operation(
        "Describe the tokenizer", "Its special tokens and its chat template; 404 without one."
    ),
    "/server_info": Operation(
        "Describe the server",
        "Model, system fingerprint, state, context, vocabulary, ranks and every limit; vllm_config "
        "has what clients of vLLM read.",
    ),
    "/get_server_info": Operation("Describe the server", "SGLang's older name of /server_info."),
    "/model_info": Operation("Describe the model", "The served model, as SGLang tells of one."),
    "/get_model_info": Operation("Describe the model", "SGLang's older name of /model_info."),
    "/info": Operation(
        "Describe a model that pools", "The served model, as text-embeddings-inference tells of it."
    ),
    "/v1/loads": Operation(
        "Count the requests", "How many run and wait now, as SGLang tells of it."
    ),
    "/get_world_size": Operation("Count the ranks", "The tensor-parallel size, as vLLM has it."),
    "/health": Operation(
        "Is the engine alive?", "200 while the engine makes progress, else 503 with the reason."
    ),
    "/health_generate": Operation(
        "Is the engine alive?", "As /health: while it makes progress it can generate."
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

CONTROL_OPERATIONS = {
    "/pause": Operation(
        "Pause", "Requests end (abort), are waited for (wait) or stay where they are (keep)."
    ),
    "/resume": Operation("Resume", "Requests are taken and served again."),
    "/is_paused": Operation("Is the server paused?", "Whether it is."),
    "/abort_requests": Operation(
        "End requests", "All, or those named, end with what they have; how many they were."
    ),
    "/reset_prefix_cache": Operation(
        "Empty the prefix cache", "Running requests are computed again, so that it is empty."
    ),
    "/weight_info": Operation("Which weights serve?", "Their version, and the model digest."),
    "/update_weight_version": Operation(
        "Name the weights", "What the present weights are called from now on."
    ),
    "/weight_checker": Operation("Compare weights", "Digests of the weights that serve."),
    "/pause_generation": Operation("Pause", "SGLang's route: abort, retract or in_place."),
    "/continue_generation": Operation("Resume", "SGLang's route."),
    "/abort_request": Operation("End a request", "SGLang's route: one by its id, or all."),
    "/flush_cache": Operation("Empty the prefix cache", "SGLang's route."),
    "/get_weight_version": Operation("Which weights serve?", "SGLang's route."),
    "/weights_checker": Operation("Compare weights", "SGLang's route."),
    "/init_weight_transfer_engine": Operation(
        "Meet a sender of weights", "The ranks join the sender's group."
    ),
    "/start_weight_update": Operation("Begin a weight update", "Nothing changes yet."),
    "/update_weights": Operation(
        "Receive weights", "Tensors of a sender, or a directory, are laid out over the old ones."
    ),
    "/finish_weight_update": Operation(
        "Serve by the new weights", "Refused, with their names, where tensors are missing."
    ),
    "/shutdown_weight_transfer_engine": Operation("Leave a sender of weights", "For good."),
    "/update_weights_from_disk": Operation("Load weights of a directory", "SGLang's route."),
    "/init_weights_update_group": Operation("Meet a sender of weights", "SGLang's route."),
    "/update_weights_from_distributed": Operation("Receive weights", "SGLang's route."),
    "/destroy_weights_update_group": Operation("Leave a sender of weights", "SGLang's route."),
}
"""Of the control routes, which only a server that was started with them has."""

_RESIDENT = (
    "memory stays with the server, whose graphs hold addresses: give the trainer its own GPU, "
    "or both a part of one by --gpu-memory-utilization"
)
_NEVER_UNPICKLED = (
    "no message is unpickled: use /update_weights with ipc_handles in JSON, a group of senders, "
    "or a directory"
)

BATCH_OPERATIONS = {
    "/v1/files": Operation(
        "Send or list files", "A file of requests is sent as a form, with its purpose, batch."
    ),
    "/v1/files/{file_id}": Operation("Describe or delete a file", "One's own; 404 for any other."),
    "/v1/files/{file_id}/content": Operation(
        "Get a file", "What was sent, or the answers to a batch, a line for each."
    ),
    "/v1/batches": Operation(
        "Begin or list batches", "The requests of a file are answered while nobody else waits."
    ),
    "/v1/batches/{batch_id}": Operation(
        "Describe a batch", "How far it is, its files, and the digest of its output."
    ),
    "/v1/batches/{batch_id}/cancel": Operation(
        "Cancel a batch", "It ends, and its files have the answers that there are."
    ),
}
"""Files and batches are had with --batch-dir alone."""

FILE_ROUTES = ("/v1/files",)
"""Bodies to these are files, which are worked on as they come."""

# Paths of other servers: what to use here instead.
ELSEWHERE = {
    "/sleep": _RESIDENT,
    "/wake_up": _RESIDENT,
    "/is_sleeping": _RESIDENT,
    "/release_memory_occupation": _RESIDENT,
    "/resume_memory_occupation": _RESIDENT,
    "/update_weights_from_tensor": _NEVER_UNPICKLED,
    "/update_weights_from_ipc": _NEVER_UNPICKLED,
    "/collective_rpc": "no function of a client is run: /openapi.json has what there is",
    "/start_draft_weight_update": "no draft model is served: /start_weight_update is for the model",
    "/begin_weight_update": "use /start_weight_update",
    "/end_weight_update": "use /finish_weight_update",
    "/init_broadcaster": "use /init_weight_transfer_engine, or /update_weights with a weight_dir",
    "/load_lora_adapter": "no adapters are served: merge it into the weights, and send those",
    "/reload_weights": "use /update_weights with a weight_dir",
    "/responses": "the path begins with /v1: use /v1/responses",
    "/messages": "the path begins with /v1: use /v1/messages",
    "/v1/messages/batches": "use /v1/batches with its endpoint /v1/messages",
    "/embed_all": "a text has one vector here: use /embed",
    "/embed_sparse": "no model here has sparse vectors: use /embed",
    "/embeddings": "the path begins with /v1: use /v1/embeddings",
    "/decode": "use /detokenize",
    "/vertex": "use /embed, /predict or /rerank",
    "/v1/audio/transcriptions": "text is the only kind of content here",
    "/v1/images/generations": "text is the only kind of content here",
    "/v1/batches": "there are no batches: start the server with --batch-dir DIR, or take tpdet "
    "run-batch",
    "/v1/files": "no files are kept: start the server with --batch-dir DIR, or take tpdet "
    "run-batch",
    "/v1/moderations": "nothing is moderated here",
    "/v1": "it is what clients take as base URL: they add /chat/completions, /completions, /models",
    "/chat/completions": "the path begins with /v1: use /v1/chat/completions",
    "/completions": "the path begins with /v1: use /v1/completions",
    "/models": "the path begins with /v1: use /v1/models",
    "/api/tags": "Ollama's API is not served: use /v1/models",
    "/api/chat": "Ollama's API is not served: use /v1/chat/completions",
    "/api/generate": "Ollama's API is not served: use /v1/completions",
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
    if path.startswith("/v1/responses/"):
        return (
            "responses are not stored, nor compacted or counted: POST /v1/responses with the whole "
            "conversation as input"
        )
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
