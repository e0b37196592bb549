"""Token ids of texts that are pooled: with a named prompt, or a query with a document. No torch.

A reranker that answers with a token (`--task score` of a model with an output head) reads
Qwen3-Reranker's form: its words stand here, and truncation cuts the document alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tpdet.checkpoint.model_config.pooling import Pooling
from tpdet.errors import RequestError
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
        kept = self._cut(ids, most - len(before) - len(after), truncate)
        return (*before, *kept, *after)[:most]

    def ids(self, ids: Sequence[int], truncate: int | None = None) -> tuple[int, ...]:
        """The ids of a prompt that is no text; `request` refuses those over the context."""
        return tuple(ids) if truncate is None else tuple(ids[: self._room(truncate)])

    def pair(
        self,
        query: str,
        document: str,
        truncate: int | None = None,
        instruction: str | None = None,
    ) -> tuple[int, ...]:
        """The ids of a query with a document, for a model that scores pairs."""
        for name, text in (("query", query), ("document", document)):
            if not text:
                raise RequestError(f"a {name} is empty: give at least one character", name)
        tokenizer, room = self._tokenizer(), self._room(truncate)
        if self.pooling.answers == "labels":
            if instruction is not None:
                raise RequestError("this model reads no instruction: leave it out", "instruction")
            ids = tokenizer.encode_pair(query, document)
            without = len(tokenizer.encode_pair(query, ""))
        else:
            asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: "
            before, after = (tokenizer.encode(part, False) for part in (_BEFORE, _BEHIND))
            ids, without = (
                tokenizer.encode(asked + document, False),
                len(tokenizer.encode(asked, False)),
            )
            room -= len(before) + len(after)
        if without >= room:
            raise RequestError(
                f"the query has {without} tokens, and {room} are left for it and the document: "
                "shorten it",
                "query",
            )
        kept = self._cut(ids, room, truncate)
        return tuple(kept) if self.pooling.answers == "labels" else (*before, *kept, *after)

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
        request = Request(
            request_id=request_id, prompt_token_ids=kept, params=_NOTHING, pooling=params
        )
        check_against_model(request, self.vocab_size, self.max_model_len)
        return request

    def answering_tokens(self) -> tuple[int, int]:
        """The ids of "yes" and "no", each of which is one token."""
        ids_of = [self._tokenizer().encode(word, False) for word in ("yes", "no")]
        for word, ids in zip(("yes", "no"), ids_of, strict=True):
            if len(ids) != 1:
                raise RequestError(
                    f"{word!r} is {len(ids)} tokens in this model's vocabulary, not one: it is no "
                    "reranker of this form",
                    "task",
                )
        return ids_of[0][0], ids_of[1][0]

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

    def _cut(self, ids: Sequence[int], room: int, truncate: int | None) -> Sequence[int]:
        if truncate is None and len(ids) > room:
            more = self.max_model_len - room
            raise RequestError(
                f"the text has {len(ids) + more} tokens, over the model's context of "
                f"{self.max_model_len}: shorten it, or send truncate_prompt_tokens",
                "input",
            )
        return ids[: max(room, 0)]
