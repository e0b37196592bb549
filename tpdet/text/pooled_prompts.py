"""Token ids of texts that are pooled: with a named prompt, or a query with a document. No torch.

A reranker that answers with a token (`--task score` of a model with an output head) reads
Qwen3-Reranker's form: its words stand here, and truncation cuts the document alone.
"""

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tpdet.checkpoint.model_config.pooling import Pooling
from tpdet.errors import RequestError, UsageError
from tpdet.requests.pooling_params import PoolingParams
from tpdet.requests.request import Request, check_against_model
from tpdet.requests.sampling_params import SamplingParams
from tpdet.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_NOTHING = SamplingParams(max_tokens=0, temperature=0.0, seed=0)


@dataclass(frozen=True)
class PooledPrompts:
    """Makes requests of texts for one model. Its methods raise RequestError.

    truncate, an argument of its methods: tokens that are kept of a longer text, -1 for the context;
    without it (None) a longer text is refused.
    """

    tokenizer: Tokenizer | None
    pooling: Pooling
    vocab_size: int
    max_model_len: int

    def text(
        self, text: str, prompt_name: str | None = None, truncate: int | None = None
    ) -> tuple[int, ...]:
        """The ids of a text behind the prompt of this name, or behind the default one."""
        tokenizer, name = self._tokenizer(), prompt_name or self.pooling.default_prompt
        if name is not None and name not in [*self.pooling.prompts]:
            raise RequestError(
                f"prompt_name {name!r:.60}: the model has "
                f"{', '.join(self.pooling.prompts) or 'no prompts'}",
                "prompt_name",
            )
        if not text:
            raise RequestError("a text is empty: give at least one character", "input")
        behind = self.pooling.prompts[name] + text if name is not None else text
        most = None if truncate is not None else self.max_model_len
        ids = tokenizer.encode(behind, add_special_tokens=False, most=most, field="input")
        before, after = tokenizer.around
        most = self._room(truncate)
        kept = self._cut(ids, most - len(before) - len(after), truncate, "input")
        return (*before, *kept, *after)[:most]

    def ids(
        self, ids: Sequence[int], prompt_name: str | None = None, truncate: int | None = None
    ) -> tuple[int, ...]:
        """The ids of a prompt that is no text; `request` refuses those over the context."""
        if prompt_name:
            raise RequestError(
                f"prompt_name {prompt_name!r:.60} is of texts, and this prompt is token ids: "
                "leave it out",
                "prompt_name",
            )
        return tuple(ids) if truncate is None else tuple(ids[: self._room(truncate)])

    def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        truncate: int | None = None,
        instruction: str | None = None,
    ) -> list[tuple[int, ...]]:
        """The ids of each query with its document, for a model that scores pairs.

        Texts that cannot fit are refused before they are encoded; queries alone, and what stands
        around a pair, are encoded once.
        """
        for name, number in (("query", 0), ("document", 1)):
            for index, pair in enumerate(pairs):
                if not pair[number]:
                    with naming(index, pairs):
                        raise RequestError(f"a {name} is empty: give at least one character", name)
        tokenizer, room = self._tokenizer(), self._room(truncate)
        form: _LabelPair | _TokenPair
        if self.pooling.answers == "labels":
            if instruction is not None:
                raise RequestError("this model reads no instruction: leave it out", "instruction")
            form = _LabelPair(tokenizer)
        else:
            form = _TokenPair(tokenizer, instruction or INSTRUCTION)
        around = len(form.before) + len(form.behind)
        for query in dict.fromkeys(query for query, _ in pairs):
            without = len(form.ids(query, "", self.max_model_len, "query"))
            if without >= room - around:
                raise RequestError(
                    f"the query has {without} tokens, and {around} more stand around it and the "
                    f"document: that leaves no room for one in {room}: shorten it"
                    + ("" if room == self.max_model_len else ", or raise truncate_prompt_tokens"),
                    "query",
                )
        most, every = None if truncate is not None else self.max_model_len, []
        for index, (query, document) in enumerate(pairs):
            with naming(index, pairs):
                ids = form.ids(query, document, most, "document")
                kept = self._cut(ids, room - around, truncate, "document")
            every.append((*form.before, *kept, *form.behind))
        return every

    def request(self, ids: Sequence[int], params: PoolingParams, request_id: str) -> Request:
        """The checked request of a prompt."""
        kept = tuple(ids)
        if self.pooling.padding is not None:
            last = len(kept)
            while last and kept[last - 1] == self.pooling.padding:
                last -= 1
            if kept and not last:
                raise RequestError("the prompt is padding alone: give a token", "prompt")
            kept = kept[:last]
        self._cut(kept, self.max_model_len, None, "prompt")
        request = Request(
            request_id=request_id, prompt_token_ids=kept, params=_NOTHING, pooling=params
        )
        check_against_model(request, self.vocab_size, self.max_model_len)
        return request

    def answering_tokens(self) -> tuple[int, int]:
        """As the function of this name."""
        return answering_tokens(self._tokenizer())

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("a text needs a tokenizer: pass token ids", "input")
        return self.tokenizer

    def _room(self, truncate: int | None) -> int:
        if truncate is None or truncate == -1:
            return self.max_model_len
        if type(truncate) is not int or not 1 <= truncate <= self.max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens {truncate!r:.60} must be -1, or from 1 to the context of "
                f"{self.max_model_len}",
                "truncate_prompt_tokens",
            )
        return truncate

    def _cut(
        self, ids: Sequence[int], room: int, truncate: int | None, field: str
    ) -> Sequence[int]:
        if truncate is None and len(ids) > room:
            more = self.max_model_len - room
            raise RequestError(
                f"the text has {len(ids) + more} tokens, over the model's context of "
                f"{self.max_model_len}: shorten it, or send truncate_prompt_tokens",
                field,
            )
        return ids[: max(room, 0)]


@contextmanager
def naming(index: int, several: Sequence[object]) -> Iterator[None]:
    """While it is entered, a RequestError says which of several texts it is about."""
    try:
        yield
    except RequestError as error:
        if len(several) == 1:
            raise
        raise RequestError(f"at index {index}: {error}", error.param) from None


def answering_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """The ids of "yes" and "no". Raises UsageError where one of them is several tokens."""
    ids_of = [tokenizer.encode(word, False) for word in ("yes", "no")]
    for word, ids in zip(("yes", "no"), ids_of, strict=True):
        if len(ids) != 1:
            raise UsageError(
                f"task score: {word!r} is {len(ids)} tokens of this model's vocabulary, and a "
                "score is of the logits of one: use a reranker that answers yes or no, a "
                "checkpoint with a score head, or task embed"
            )
    return ids_of[0][0], ids_of[1][0]


class _LabelPair:
    """A query and a document as the tokenizer joins them."""

    before: Sequence[int] = ()
    behind: Sequence[int] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def ids(self, query: str, document: str, most: int | None, field: str) -> list[int]:
        """Ids of a query and a document, without what stands around them."""
        return self._tokenizer.encode_pair(query, document, most, field)


class _TokenPair:
    """A query and a document in the form of Qwen3-Reranker."""

    def __init__(self, tokenizer: Tokenizer, instruction: str) -> None:
        self._tokenizer, self._instruction = tokenizer, instruction
        self.before, self.behind = (tokenizer.encode(part, False) for part in (_BEFORE, _BEHIND))

    def ids(self, query: str, document: str, most: int | None, field: str) -> list[int]:
        """Ids of a query and a document, without what stands around them."""
        asked = f"<Instruct>: {self._instruction}\n<Query>: {query}\n<Document>: {document}"
        return self._tokenizer.encode(asked, False, most, field)


def paired(
    first: object, second: object, names: tuple[str, str], most: int | None = None
) -> list[tuple[str, str]]:
    """One text with each other, or as many with as many.

    names: what the two are called. most: texts of each, at most. Raises RequestError.
    """
    lists = [
        _texts_of(value, name, most) for value, name in zip((first, second), names, strict=True)
    ]
    if len(lists[0]) == 1:
        lists[0] *= len(lists[1])
    if len(lists[0]) != len(lists[1]):
        raise RequestError(
            f"{len(lists[0])} texts against {len(lists[1])}: give one against many, or as many",
            names[0],
        )
    return list(zip(*lists, strict=True))


def _texts_of(value: object, name: str, most: int | None) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise RequestError(f"{name} is {reprlib.repr(value)}: give a text or a list of texts", name)
    if not texts or (most is not None and len(texts) > most):
        limit = "at least one" if most is None else f"1 to {most:,}"
        raise RequestError(f"{name} has {len(texts):,} texts: give {limit}", name)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(f"{name}[{index}] is {reprlib.repr(text)}: give text", name)
    return list(texts)
