"""Bodies of text-embeddings-inference's routes, with the fields of ours as properties.

Unlike that server's, texts are cut at their end alone, and where `truncate` is left out a text over
the context is refused.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from tpdet.requests.body import limits
from tpdet.requests.body.idle_fields import IDLE
from tpdet.requests.body.schema import IDS, TEXT, Body

_MANY = {"type": "array", "minItems": 1, "maxItems": limits.MAX_POOLED_INPUTS}
_FORMS = [TEXT, IDS, _MANY | {"items": TEXT}, _MANY | {"items": IDS}]
Input = Annotated[Any, WithJsonSchema({"anyOf": _FORMS})]
Texts = Annotated[Any, WithJsonSchema({"anyOf": _FORMS[::2]})]
_ONE_OR_TWO = {"type": "array", "minItems": 1, "maxItems": 2, "items": TEXT}
Predicted = Annotated[
    Any, WithJsonSchema({"anyOf": [TEXT, _ONE_OR_TWO, _MANY | {"items": _ONE_OR_TWO}]})
]


class _Truncating(Body):
    """What bodies have, or their `parameters`."""

    idle = IDLE["tei"]
    truncate: bool | None = None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """As in our bodies: to the context, or not at all."""
        return -1 if self.truncate else None


class TeiBody(_Truncating):
    """What every body may have."""

    model: Annotated[str, Field(max_length=limits.MAX_MODEL_CHARACTERS)] | None = None


class EmbedBody(TeiBody):
    """`POST /embed`: texts or token ids."""

    idle = IDLE["tei_embed"]
    inputs: Input
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def use_activation(self) -> bool:
        """Whether vectors get the length 1."""
        return self.normalize is not False


class Sentences(Body):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(_Truncating):
    """How the sentences of `POST /similarity` are read."""

    prompt_name: str | None = None


class SimilarityBody(TeiBody):
    """`POST /similarity`: the cosine of one sentence's vector and each other's."""

    inputs: Sentences
    parameters: SimilarityParameters = SimilarityParameters()
    use_activation: ClassVar[bool] = True


class PredictParameters(Body):
    """How Hugging Face's clients ask for labels."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None


class PredictBody(TeiBody):
    """`POST /predict`: a text, a pair of texts, or a list of lists of one text or two.

    Where it has `parameters`, as Hugging Face's clients send them, one text's labels stand in a
    list as those of many do.
    """

    inputs: Predicted
    raw_scores: bool | None = None
    parameters: PredictParameters | None = None


class RanksBody(TeiBody):
    """`POST /rerank` with `texts`."""

    instruction: ClassVar[None] = None
    max_tokens_per_doc: ClassVar[None] = None
    top_n: ClassVar[None] = None
    query: str
    texts: Annotated[list[str], Field(min_length=1, max_length=limits.MAX_POOLED_INPUTS)]
    raw_scores: bool | None = None
    return_text: bool | None = None

    @property
    def documents(self) -> list[str]:
        """The texts, by our name."""
        return self.texts

    @property
    def return_documents(self) -> bool:
        """Whether the answer has them."""
        return self.return_text is True

    @property
    def use_activation(self) -> bool:
        """Whether a score is between 0 and 1."""
        return not self.raw_scores
