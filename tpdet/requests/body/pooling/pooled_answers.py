"""The JSON of pooled answers, in OpenAI's form, vLLM's, Cohere's and Jina's, or TEI's.

TEI is text-embeddings-inference. Needs no torch.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from tpdet.audit.pooled import numbers_of
from tpdet.kernels.order import fraction_bits
from tpdet.requests.routes import PooledRoute

PooledForm = PooledRoute | Literal["ranks"]
"""A body and its answer have the form of a route, or that of TEI's /rerank."""
TEI_FORMS = ("embed", "predict", "similarity", "ranks")


@dataclass(frozen=True)
class AnswerShape:
    """How the numbers of a call are shown: as plain data, for other processes make calls too.

    base64: of vectors and of what a head gives. labels: their names. top: documents that a ranking
    names, or labels of a text; texts: what they are, None where it does not show them. single:
    what one text has, without a list around it. pairs: of texts, by their numbers, whose
    cosines are asked for; empty where each prompt has a score of its own.
    """

    base64: bool = False
    labels: tuple[str, ...] = ()
    top: int = 0
    texts: tuple[str, ...] | None = None
    single: bool = False
    pairs: tuple[tuple[int, int], ...] = ()


Values = Sequence[bytes]
"""The fp32 values, little-endian, of each prompt of a call."""


def _rows(kind: str, key: str, shape: AnswerShape, values: Values) -> dict[str, Any]:
    shown = [base64.b64encode(v).decode() if shape.base64 else numbers_of(v) for v in values]
    return {"data": [{"object": kind, "index": i, key: one} for i, one in enumerate(shown)]}


def _labels(shape: AnswerShape, values: Values) -> dict[str, Any]:
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


def _scores(shape: AnswerShape, values: Values) -> dict[str, Any]:
    return {
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(_each_score(shape, values))
        ]
    }


def _ranking(shape: AnswerShape, values: Values) -> dict[str, Any]:
    texts = shape.texts
    return {
        "results": [
            {"index": index, "relevance_score": score}
            | ({} if texts is None else {"document": {"text": texts[index]}})
            for index, score in _best(_each_score(shape, values))[: shape.top]
        ]
    }


def _ranks(shape: AnswerShape, values: Values) -> list[dict[str, Any]]:
    texts = shape.texts
    return [
        {"index": index} | ({} if texts is None else {"text": texts[index]}) | {"score": score}
        for index, score in _best(_each_score(shape, values))
    ]


def _predictions(shape: AnswerShape, values: Values) -> list[Any]:
    every = [
        [
            {"label": shape.labels[index], "score": score}
            for index, score in _best(numbers_of(value))[: shape.top]
        ]
        for value in values
    ]
    return every[0] if shape.single else every


def _each_score(shape: AnswerShape, values: Values) -> list[float]:
    return _cosines(shape, values) if shape.pairs else [numbers_of(value)[0] for value in values]


def _best(scores: Sequence[float]) -> list[tuple[int, float]]:
    """The places of scores with them, the best first, of equal ones the first."""
    return sorted(enumerate(scores), key=lambda pair: (-pair[1], pair[0]))


def _cosines(shape: AnswerShape, values: Values) -> list[float]:
    """The product of each pair of vectors, as `similarity` of `kernels/exact/pooling.py`."""
    rows = np.frombuffer(b"".join(values), "<f4").reshape(len(values), -1).astype(np.float64)
    one, other = np.array(shape.pairs).T
    terms = rows[one] * rows[other]
    exponent = np.frexp(np.abs(terms).max(1))[1].astype(np.int64) - 1
    bits = fraction_bits(terms.shape[1])
    whole = np.rint(np.ldexp(terms, (bits - exponent)[:, None])).astype(np.int64).sum(1)
    sums = np.ldexp(whole.astype(np.float64), exponent - bits)
    cosines: list[float] = sums.astype("<f4").tolist()
    return cosines


ANSWERS: dict[PooledForm, Callable[[AnswerShape, Values], Any]] = {
    "embeddings": partial(_rows, "embedding", "embedding"),
    "pooling": partial(_rows, "pooling", "data"),
    "classify": _labels,
    "score": _scores,
    "rerank": _ranking,
    "embed": lambda shape, values: [numbers_of(value) for value in values],
    "predict": _predictions,
    "similarity": _cosines,
    "ranks": _ranks,
}
"""The body of an answer, in TEI's forms; of the others its part beside what all have."""
