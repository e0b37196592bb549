"""Bodies of the routes that answer with numbers, and the JSON of their answers. Needs no torch.

Vectors are in OpenAI's form, scores, labels and rewards in vLLM's, ranks in Cohere's and Jina's.
"""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, WithJsonSchema

from tpdet.audit.pooled import bits_digest, numbers_of, pooled_digest
from tpdet.requests.body import limits
from tpdet.requests.body.idle_fields import Idle
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.problems import bad_request, request_errors_as_problems
from tpdet.requests.body.schema import IDS, TEXT, Body
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.pooling_params import NOT_POOLED, PoolingParams
from tpdet.requests.request import PooledOutput, Request
from tpdet.requests.routes import PooledRoute
from tpdet.text.pooled_prompts import PooledPrompts, paired

_MANY = {"type": "array", "minItems": 1, "maxItems": limits.MAX_POOLED_INPUTS}
_FORMS = [TEXT, IDS, _MANY | {"items": TEXT}, _MANY | {"items": IDS}]
Input = Annotated[Any, WithJsonSchema({"anyOf": _FORMS})]
Texts = Annotated[Any, WithJsonSchema({"anyOf": _FORMS[::2]})]
_ANSWERS = {
    "embeddings": ("vector",),
    "classify": ("labels",),
    "pooling": ("vector", "labels"),
    "score": ("labels", "tokens"),
    "rerank": ("labels", "tokens"),
}
_USE = {
    "vector": "/v1/embeddings or /pooling",
    "labels": "/classify, /pooling, or with one label /score and /rerank",
    "tokens": "/score or /rerank",
}


class _Common(Body):
    """What every body may have."""

    idle: ClassVar[dict[str, Idle]] = {
        "priority": Idle((0,), "requests are taken in the order they came")
    }
    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None
    user: Annotated[str, Field(max_length=limits.MAX_USER_BYTES)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    use_activation: bool | None = None


class EmbeddingsBody(_Common):
    """`POST /v1/embeddings`: texts or token ids; `prompt_name` is a sentence-transformers one."""

    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None


class PoolingBody(_Common):
    """`POST /classify` and `POST /pooling`: texts or token ids."""

    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class ScoreBody(_Common):
    """`POST /score`: one text against others, or as many pairs as there are."""

    text_1: Texts
    text_2: Texts
    instruction: str | None = None


class Document(Body):
    """A document as an object."""

    text: str


class RerankBody(_Common):
    """`POST /rerank`: documents by how well they fit a query."""

    query: str
    documents: Annotated[
        list[str | Document], Field(min_length=1, max_length=limits.MAX_POOLED_INPUTS)
    ]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None


BODIES: dict[PooledRoute, type[_Common]] = {
    "embeddings": EmbeddingsBody,
    "classify": PoolingBody,
    "pooling": PoolingBody,
    "score": ScoreBody,
    "rerank": RerankBody,
}


@dataclass(frozen=True)
class AnswerShape:
    """How the numbers of a call are shown: as plain data, for other processes make calls too.

    base64: of vectors and of what a head gives. labels: their names. top: documents that a ranking
    names; texts: what they are, None where it does not show them.
    """

    base64: bool = False
    labels: tuple[str, ...] = ()
    top: int = 0
    texts: tuple[str, ...] | None = None


@dataclass(frozen=True)
class PooledCall:
    """One HTTP request for numbers: its prompts, and the form of its answer."""

    route: PooledRoute
    identifier: str
    model: str
    requests: tuple[Request, ...]
    shape: AnswerShape

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    def answer(
        self, answers: Mapping[str, PooledOutput], facts_of: Callable[[int], EngineFacts]
    ) -> dict[str, Any]:
        """The body of the answer; answers: the output to each request, by its id.

        facts_of: the engine's facts under the weights of a number.
        """
        outputs = [answers[request.request_id] for request in self.requests]
        values, count = [output.values for output in outputs], self.prompt_tokens
        by = [facts_of(output.weights) for output in outputs]
        bits = {"embedding_bits": list(map(bits_digest, values))}
        return {
            "id": self.identifier,
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
            **_SHAPES[self.route](self.shape, values),
            "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
            "tpdet": {
                "system_fingerprint": by[-1].system_fingerprint,
                "digests": [
                    pooled_digest(
                        request, value, facts.contract, facts.model_digest, facts.pooling_digest
                    )
                    for request, value, facts in zip(self.requests, values, by, strict=True)
                ],
                **(bits if self.route == "embeddings" else {}),
            },
        }


def pooled_call(
    route: PooledRoute, preparer: Preparer, fields: dict[str, Any], request_id: str
) -> PooledCall:
    """The engine's part of a request for numbers. Raises ApiError."""
    facts = preparer.facts
    if facts.pooling is None:
        raise bad_request(NOT_POOLED, None, "not_supported")
    if facts.pooling.answers not in _ANSWERS[route]:
        raise bad_request(
            f"this model (task {facts.pooling.task}) answers {_USE[facts.pooling.answers]}",
            None,
            "not_supported",
        )
    with request_errors_as_problems():
        body = parse_body(BODIES[route], fields)
        preparer.check_model(body.model)
        prompts = PooledPrompts(
            preparer.prompts.tokenizer, facts.pooling, facts.vocab_size, facts.max_model_len
        )
        make = _of_pairs if isinstance(body, ScoreBody | RerankBody) else _of_inputs
        token_ids, params, shape = make(route, body, prompts)
        requests = tuple(
            _salted(prompts.request(ids, params, f"pool-{request_id}-{index}"), preparer)
            for index, ids in enumerate(token_ids)
        )
    name = f"{route}-{request_id}"
    return PooledCall(route, name, preparer.served_name, requests, shape)


_Made = tuple[list[tuple[int, ...]], PoolingParams, AnswerShape]


def _salted(request: Request, preparer: Preparer) -> Request:
    return msgspec.structs.replace(request, tenant_salt=preparer.tenant_salt)


def _of_inputs(route: PooledRoute, body: Any, prompts: PooledPrompts) -> _Made:
    """What is asked of single texts. Raises ApiError, or RequestError naming the field."""
    pooling, truncate = prompts.pooling, body.truncate_prompt_tokens
    if body.dimensions is not None and pooling.answers != "vector":
        raise bad_request("dimensions are of vectors: leave them out", "dimensions")
    if body.dimensions is not None and body.dimensions > pooling.width:
        raise bad_request(
            f"dimensions {body.dimensions} is over the vector's width of {pooling.width}: lower it",
            "dimensions",
        )
    if route == "classify" and body.encoding_format == "base64":
        raise bad_request(
            "encoding_format base64 is of /pooling: labels have numbers here", "encoding_format"
        )
    name = getattr(body, "prompt_name", None)
    token_ids = [
        prompts.text(one, name, truncate) if isinstance(one, str) else prompts.ids(one, truncate)
        for one in _inputs(body.input)
    ]
    activation = body.use_activation
    if route == "pooling" and activation is None and pooling.task == "reward":
        activation = False
    params = PoolingParams(dimensions=body.dimensions, use_activation=activation)
    return token_ids, params, AnswerShape(body.encoding_format == "base64", pooling.labels)


def _of_pairs(route: PooledRoute, body: Any, prompts: PooledPrompts) -> _Made:
    """What is asked of pairs of texts. Raises ApiError, or RequestError naming the field."""
    if prompts.pooling.width != 1:
        raise bad_request(
            f"a score needs a head of one label, this model has {prompts.pooling.width}",
            None,
            "not_supported",
        )
    texts: list[str] = []
    if isinstance(body, RerankBody):
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        pairs = [(body.query, text) for text in texts]
        if body.max_tokens_per_doc is not None:
            raise bad_request(
                "max_tokens_per_doc is not supported: send truncate_prompt_tokens, of the whole",
                "max_tokens_per_doc",
                "not_supported",
            )
    else:
        names, most = ("text_1", "text_2"), limits.MAX_POOLED_INPUTS
        pairs = paired(body.text_1, body.text_2, names, most)
    token_ids = prompts.pairs(pairs, body.truncate_prompt_tokens, body.instruction)
    answering = prompts.answering_tokens() if prompts.pooling.answers == "tokens" else ()
    params = PoolingParams(use_activation=body.use_activation, token_ids=answering)
    if not isinstance(body, RerankBody):
        return token_ids, params, AnswerShape()
    shown = tuple(texts) if body.return_documents is not False else None
    return token_ids, params, AnswerShape(top=body.top_n or len(texts), texts=shown)


def _inputs(value: Any) -> list[str | list[int]]:
    """The texts and lists of ids of an `input`. Raises ApiError for anything else."""
    single = isinstance(value, str) or (isinstance(value, list) and value[:1] and _is_id(value[0]))
    several = [value] if single else value
    forms = f"send text, token ids, or a list of up to {limits.MAX_POOLED_INPUTS:,} of either"
    if not isinstance(several, list) or not several:
        raise bad_request(f"input is {_shown(value)}: {forms}", "input")
    if len(several) > limits.MAX_POOLED_INPUTS:
        raise bad_request(f"input has {len(several)} entries: {forms}", "input")
    for index, one in enumerate(several):
        if not isinstance(one, str) and not (isinstance(one, list) and all(map(_is_id, one))):
            raise bad_request(f"input[{index}] is {_shown(one)}: {forms}", "input")
    return several


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _embeddings(shape: AnswerShape, values: Sequence[bytes]) -> dict[str, Any]:
    return _rows(shape, values, "embedding", "embedding")


def _pooled(shape: AnswerShape, values: Sequence[bytes]) -> dict[str, Any]:
    return _rows(shape, values, "pooling", "data")


def _rows(shape: AnswerShape, values: Sequence[bytes], kind: str, key: str) -> dict[str, Any]:
    encode: Callable[[bytes], Any] = _base64 if shape.base64 else numbers_of
    return {
        "data": [
            {"object": kind, "index": index, key: encode(value)}
            for index, value in enumerate(values)
        ]
    }


def _labels(shape: AnswerShape, values: Sequence[bytes]) -> dict[str, Any]:
    rows = [numbers_of(value) for value in values]
    return {
        "data": [
            {
                "index": index,
                "label": shape.labels[row.index(max(row))],
                "probs": row,
                "num_classes": len(row),
            }
            for index, row in enumerate(rows)
        ]
    }


def _scores(shape: AnswerShape, values: Sequence[bytes]) -> dict[str, Any]:
    return {
        "data": [
            {"index": index, "object": "score", "score": numbers_of(value)[0]}
            for index, value in enumerate(values)
        ]
    }


def _ranking(shape: AnswerShape, values: Sequence[bytes]) -> dict[str, Any]:
    """The best documents first, of equal ones the first."""
    scores, texts = [numbers_of(value)[0] for value in values], shape.texts
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return {
        "results": [
            {"index": index, "relevance_score": scores[index]}
            | ({} if texts is None else {"document": {"text": texts[index]}})
            for index in order[: shape.top]
        ]
    }


_SHAPES: dict[PooledRoute, Callable[[AnswerShape, Sequence[bytes]], dict[str, Any]]] = {
    "embeddings": _embeddings,
    "pooling": _pooled,
    "classify": _labels,
    "score": _scores,
    "rerank": _ranking,
}


def repeated_characters(fields: Mapping[str, Any]) -> int:
    """Characters that a body stands for beside its own: a query is read with each document."""
    query, documents = fields.get("query"), fields.get("documents")
    if query is None:
        query, documents = fields.get("text_1"), fields.get("text_2")
    query = query[0] if isinstance(query, list) and len(query) == 1 else query
    if not isinstance(query, str) or not isinstance(documents, list):
        return 0
    return len(query) * len(documents)
