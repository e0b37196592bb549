"""Bodies of the routes that answer with numbers, and the JSON of their answers. Needs no torch.

Vectors are in OpenAI's form, scores, labels and rewards in vLLM's, ranks in Cohere's and Jina's;
or all in that of text-embeddings-inference (`tei_body.py`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from tpdet.audit.pooled import bits_digest, pooled_digest
from tpdet.checkpoint.model_config.pooling import Pooling
from tpdet.requests.body import limits
from tpdet.requests.body.idle_fields import IDLE
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.pooling import tei_body
from tpdet.requests.body.pooling.pooled_answers import ANSWERS, TEI_FORMS, AnswerShape, PooledForm
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.problems import ApiError, bad_request, request_errors_as_problems
from tpdet.requests.body.schema import Body
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.pooling_params import NOT_POOLED, PoolingParams
from tpdet.requests.request import PooledOutput, Request
from tpdet.requests.routes import PooledRoute
from tpdet.text.pooled_prompts import PooledPrompts, naming, paired

_ANSWERS: dict[PooledForm, tuple[str, ...]] = {
    "embeddings": ("vector",),
    "classify": ("labels",),
    "pooling": ("vector", "labels"),
    "score": ("labels", "tokens", "vector"),
    "rerank": ("labels", "tokens", "vector"),
    "embed": ("vector",),
    "predict": ("labels",),
    "similarity": ("vector",),
    "ranks": ("labels", "tokens"),
}
"""What models answer each form."""
_USE = {
    "vector": "/v1/embeddings, /pooling, /score, /rerank (of documents), /embed or /similarity",
    "labels": "/classify, /pooling, /predict, or with one label /score and /rerank",
    "tokens": "/score or /rerank",
}


class _Common(Body):
    """What every body may have."""

    idle = IDLE["pooling"]
    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None
    user: Annotated[str, Field(max_length=limits.MAX_USER_BYTES)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    use_activation: bool | None = None


class EmbeddingsBody(_Common):
    """`POST /v1/embeddings`: texts or token ids; `prompt_name` is a sentence-transformers one."""

    input: tei_body.Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None


class PoolingBody(_Common):
    """`POST /classify` and `POST /pooling`: texts or token ids."""

    input: tei_body.Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class ScoreBody(_Common):
    """`POST /score`: one text against others, or as many pairs as there are."""

    text_1: tei_body.Texts
    text_2: tei_body.Texts
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


BODIES: dict[PooledForm, type[_Common | tei_body.TeiBody]] = {
    "embeddings": EmbeddingsBody,
    "classify": PoolingBody,
    "pooling": PoolingBody,
    "score": ScoreBody,
    "rerank": RerankBody,
    "embed": tei_body.EmbedBody,
    "predict": tei_body.PredictBody,
    "similarity": tei_body.SimilarityBody,
    "ranks": tei_body.RanksBody,
}
FORMS: dict[PooledRoute, tuple[PooledForm, ...]] = {
    "rerank": ("rerank", "ranks"),
    "inputs": ("embed", "predict", "similarity", "ranks"),
}
"""The forms of routes that take several."""


def bodies_of(route: PooledRoute) -> tuple[type[Body], ...]:
    """The bodies of a route, by its forms."""
    return tuple(BODIES[form] for form in FORMS.get(route, (route,)))


def _form_of(route: PooledRoute, fields: Mapping[str, Any], pooling: Pooling) -> PooledForm:
    """Which form a body is of, where a route takes several."""
    if route in FORMS and "texts" in fields:
        return "ranks"
    if route != "inputs":
        return route
    if isinstance(fields.get("inputs"), dict):
        return "similarity"
    return "embed" if pooling.answers == "vector" else "predict"


@dataclass(frozen=True)
class PooledCall:
    """One HTTP request for numbers: its prompts, and the form of its answer."""

    form: PooledForm
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
    ) -> Any:
        """The body of the answer; answers: the output to each request, by its id.

        facts_of: the engine's facts under the weights of a number.
        """
        outputs = [answers[request.request_id] for request in self.requests]
        values, count = [output.values for output in outputs], self.prompt_tokens
        shown = ANSWERS[self.form](self.shape, values)
        if self.form in TEI_FORMS:
            return shown
        by = [facts_of(output.weights) for output in outputs]
        bits = {"embedding_bits": list(map(bits_digest, values))}
        return {
            "id": self.identifier,
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
            **shown,
            "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
            "tpdet": {
                "system_fingerprint": by[-1].system_fingerprint,
                "digests": [
                    pooled_digest(
                        request, value, facts.contract, facts.model_digest, facts.pooling_digest
                    )
                    for request, value, facts in zip(self.requests, values, by, strict=True)
                ],
                **(bits if self.form == "embeddings" else {}),
            },
        }


def pooled_call(
    route: PooledRoute, preparer: Preparer, fields: dict[str, Any], request_id: str
) -> PooledCall:
    """The engine's part of a request for numbers. Raises ApiError."""
    pooling = preparer.facts.pooling
    form: PooledForm = route
    try:
        if pooling is None:
            raise bad_request(NOT_POOLED, None, "not_supported")
        form = _form_of(route, fields, pooling)
        return _call_of(form, pooling, preparer, fields, request_id)
    except ApiError as error:
        error.tei = form in (*TEI_FORMS, "inputs")
        if error.tei:  # which calls it so
            error.message = error.message.replace("truncate_prompt_tokens", "truncate")
        if error.param == "prompt":  # what the engine calls it
            error.param = "inputs" if error.tei else "input"
        raise


def _call_of(
    form: PooledForm, pooling: Pooling, preparer: Preparer, fields: dict[str, Any], request_id: str
) -> PooledCall:
    """The call of a body in this form. Raises ApiError."""
    facts = preparer.facts
    if pooling.answers not in _ANSWERS[form]:
        raise bad_request(
            f"this model (task {pooling.task}) answers {_USE[pooling.answers]}",
            None,
            "not_supported",
        )
    with request_errors_as_problems():
        body = parse_body(BODIES[form], fields)
        preparer.check_model(body.model)
        prompts = PooledPrompts(
            preparer.prompts.tokenizer, pooling, facts.vocab_size, facts.max_model_len
        )
        token_ids, params, shape = _MAKERS[form](form, body, prompts)
        requests = tuple(
            msgspec.structs.replace(
                prompts.request(ids, params, f"pool-{request_id}-{index}"),
                tenant_salt=preparer.tenant_salt,
            )
            for index, ids in enumerate(token_ids)
        )
    name = f"{form}-{request_id}"
    return PooledCall(form, name, preparer.served_name, requests, shape)


_Made = tuple[list[tuple[int, ...]], PoolingParams, AnswerShape]


def _of_inputs(form: PooledForm, body: Any, prompts: PooledPrompts) -> _Made:
    """What is asked of single texts. Raises ApiError, or RequestError naming the field."""
    pooling = prompts.pooling
    _check_dimensions(body.dimensions, pooling)
    if form == "classify" and body.encoding_format == "base64":
        raise bad_request(
            "encoding_format base64 is of /pooling: labels have numbers here", "encoding_format"
        )
    token_ids = _ids_of(body.input, "input", body, prompts)
    activation = body.use_activation
    if form == "pooling" and activation is None and pooling.task == "reward":
        activation = False
    params = PoolingParams(dimensions=body.dimensions, use_activation=activation)
    return token_ids, params, AnswerShape(body.encoding_format == "base64", pooling.labels)


def _check_dimensions(dimensions: int | None, pooling: Pooling) -> None:
    """Raises ApiError for dimensions that an answer does not have."""
    if dimensions is not None and pooling.answers != "vector":
        raise bad_request("dimensions are of vectors: leave them out", "dimensions")
    if dimensions is not None and dimensions > pooling.width:
        raise bad_request(
            f"dimensions {dimensions} is over the vector's width of {pooling.width}: lower it",
            "dimensions",
        )


def _of_embed(form: PooledForm, body: tei_body.EmbedBody, prompts: PooledPrompts) -> _Made:
    """What TEI's bodies ask for vectors of. Raises as `_of_inputs`."""
    _check_dimensions(body.dimensions, prompts.pooling)
    params = PoolingParams(dimensions=body.dimensions, use_activation=body.use_activation)
    return _ids_of(body.inputs, "inputs", body, prompts), params, AnswerShape()


def _of_sentences(form: PooledForm, body: tei_body.SimilarityBody, prompts: PooledPrompts) -> _Made:
    """What is asked of one sentence and others. Raises as `_of_inputs`."""
    sentences = body.inputs.sentences
    if not sentences:
        raise bad_request("inputs.sentences is empty: give at least one sentence", "inputs")
    texts = [body.inputs.source_sentence, *sentences]
    asked = body.parameters
    if body.truncate:
        asked = asked.model_copy(update={"truncate": True})
    token_ids = _ids_of(texts, "inputs.sentences with its source", asked, prompts)
    pairs = tuple((0, index) for index in range(1, len(texts)))
    return token_ids, PoolingParams(use_activation=True), AnswerShape(pairs=pairs)


def _of_predictions(form: PooledForm, body: tei_body.PredictBody, prompts: PooledPrompts) -> _Made:
    """What is asked of single texts and pairs, mixed. Raises as `_of_inputs`."""
    pooling, truncate, labels = prompts.pooling, body.truncate_prompt_tokens, body.parameters
    inputs = body.inputs
    single = isinstance(inputs, str) or (isinstance(inputs, list) and _is_text(inputs[:1]))
    several = [[inputs] if isinstance(inputs, str) else inputs] if single else inputs
    forms = f"send a text, a pair of texts, or up to {limits.MAX_POOLED_INPUTS:,} lists of either"
    if not isinstance(several, list) or not 1 <= len(several) <= limits.MAX_POOLED_INPUTS:
        raise bad_request(f"inputs is {_shown(inputs)}: {forms}", "inputs")
    token_ids = []
    for index, one in enumerate(several):
        if not isinstance(one, list) or not 1 <= len(one) <= 2 or not _is_text(one):
            raise bad_request(f"inputs[{index}] is {_shown(one)}: {forms}", "inputs")
        pair = len(one) == 2
        token_ids += (
            prompts.pairs([(one[0], one[1])], truncate)
            if pair
            else [prompts.text(one[0], None, truncate)]
        )
    applied = labels.function_to_apply if labels is not None else None
    if applied not in (None, "none", pooling.activation):
        raise bad_request(
            f"parameters.function_to_apply {applied!r}: this model's is {pooling.activation}, or "
            "none",
            "parameters",
            "not_supported",
        )
    params = PoolingParams(use_activation=not body.raw_scores and applied != "none")
    top = labels.top_k if labels is not None and labels.top_k else len(pooling.labels)
    shape = AnswerShape(labels=pooling.labels, top=top, single=single and labels is None)
    return token_ids, params, shape


def _of_pairs(form: PooledForm, body: Any, prompts: PooledPrompts) -> _Made:
    """What is asked of pairs of texts. Raises ApiError, or RequestError naming the field."""
    vectors = prompts.pooling.answers == "vector"
    if prompts.pooling.width != 1 and not vectors:
        raise bad_request(
            f"a score needs a head of one label, this model has {prompts.pooling.width}",
            None,
            "not_supported",
        )
    shape = AnswerShape()
    if isinstance(body, RerankBody | tei_body.RanksBody):
        texts = tuple(one if isinstance(one, str) else one.text for one in body.documents)
        shown = texts if body.return_documents is not False else None
        shape = AnswerShape(top=body.top_n or len(texts), texts=shown)
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
    if vectors:
        return _of_cosines(body, pairs, shape, prompts)
    token_ids = prompts.pairs(pairs, body.truncate_prompt_tokens, body.instruction)
    answering = prompts.answering_tokens() if prompts.pooling.answers == "tokens" else ()
    params = PoolingParams(use_activation=body.use_activation, token_ids=answering)
    return token_ids, params, shape


def _of_cosines(
    body: ScoreBody | RerankBody,
    pairs: list[tuple[str, str]],
    shape: AnswerShape,
    prompts: PooledPrompts,
) -> _Made:
    """What is asked of pairs of texts by a model of vectors: each text once. Raises ApiError."""
    for field, is_asked in (
        ("instruction", body.instruction is not None),
        ("use_activation", body.use_activation is False),
    ):
        if is_asked:
            why = "this model's scores are cosines of vectors of length 1, of texts as they are"
            raise bad_request(f"{why}: leave {field} out", field, "not_supported")
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    field = "documents" if isinstance(body, RerankBody) else "text_2"
    if len(texts) > limits.MAX_POOLED_INPUTS:
        most = limits.MAX_POOLED_INPUTS
        raise bad_request(f"{len(texts):,} texts are asked for: give up to {most:,}", field)
    numbers = {text: number for number, text in enumerate(texts)}
    token_ids = [prompts.text(text, None, body.truncate_prompt_tokens) for text in texts]
    shape = replace(shape, pairs=tuple((numbers[one], numbers[other]) for one, other in pairs))
    return token_ids, PoolingParams(use_activation=True), shape


_MAKERS: dict[PooledForm, Callable[[PooledForm, Any, PooledPrompts], _Made]] = {
    **dict.fromkeys(("embeddings", "classify", "pooling"), _of_inputs),
    **dict.fromkeys(("score", "rerank", "ranks"), _of_pairs),
    "embed": _of_embed,
    "predict": _of_predictions,
    "similarity": _of_sentences,
}


def _ids_of(value: Any, field: str, body: Any, prompts: PooledPrompts) -> list[tuple[int, ...]]:
    """The ids of each text or list of ids of a field. Raises ApiError for anything else."""
    single = isinstance(value, str) or (isinstance(value, list) and value[:1] and _is_id(value[0]))
    several = [value] if single else value
    forms = f"send text, token ids, or a list of up to {limits.MAX_POOLED_INPUTS:,} of either"
    if not isinstance(several, list) or not several:
        raise bad_request(f"{field} is {_shown(value)}: {forms}", field)
    if len(several) > limits.MAX_POOLED_INPUTS:
        raise bad_request(f"{field} has {len(several)} entries: {forms}", field)
    for index, one in enumerate(several):
        if not isinstance(one, str) and not (isinstance(one, list) and all(map(_is_id, one))):
            raise bad_request(f"{field}[{index}] is {_shown(one)}: {forms}", field)
    name, truncate = getattr(body, "prompt_name", None), body.truncate_prompt_tokens
    every = []
    for index, one in enumerate(several):
        with naming(index, several):
            ids_of = prompts.text if isinstance(one, str) else prompts.ids
            every.append(ids_of(one, name, truncate))
    return every


def _is_text(values: list[object]) -> bool:
    return bool(values) and all(isinstance(value, str) for value in values)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def repeated_characters(fields: Mapping[str, Any]) -> int:
    """Characters that a body stands for beside its own: a query is read with each document."""
    query, documents = fields.get("query"), fields.get("documents") or fields.get("texts")
    if query is None:
        query, documents = fields.get("text_1"), fields.get("text_2")
    query = query[0] if isinstance(query, list) and len(query) == 1 else query
    if not isinstance(query, str) or not isinstance(documents, list):
        return 0
    return len(query) * len(documents)
