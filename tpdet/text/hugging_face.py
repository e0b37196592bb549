"""A tokenizer in the shape of Hugging Face's: the methods that scripts call on `get_tokenizer()`.

It makes the ids that the engine reads. Two things differ from transformers on purpose: text of
special tokens inside a conversation's messages stays plain text, and decoding never cleans up
spaces.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tpdet.errors import RequestError
from tpdet.requests.tools import read_tools
from tpdet.text.tokenizer import Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
         "mask_token")  # fmt: skip


class Encoding(dict[str, Any]):
    """What a call gives: `input_ids` and `attention_mask`, by key or as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"an encoding has {', '.join(self)}, and no {name}") from None


class NamedTokens:
    """The vocabulary, and tokens by their names; a name may be given another token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        found = tokenizer.info()
        self._named: dict[str, str | None] = {name: found.get(name) for name in NAMED}
        self.padding_side = "right"

    def __getattr__(self, name: str) -> Any:
        if name in NAMED:
            return self._named[name]
        if name.endswith("_id") and name[:-3] in NAMED:
            text = self._named[name[:-3]]
            return None if text is None else self._ids.get(text)
        raise AttributeError(
            f"the tokenizer has no {name}: load transformers' own from the model's directory",
            name=name,
            obj=self,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name.endswith("_id") and name[:-3] in NAMED:
            name, value = name[:-3], self._tokenizer.token(value)
        if name not in NAMED:
            super().__setattr__(name, value)
        elif value is None or value in self._ids:
            self._named[name] = value
        else:
            raise RequestError(f"{name} {value!r} is no token of the vocabulary: name one that is")

    def __len__(self) -> int:
        """The number of tokens, added ones among them."""
        return len(self._ids)

    @cached_property
    def _ids(self) -> dict[str, int]:
        tokens = ((self._tokenizer.token(id_), id_) for id_ in range(self._tokenizer.vocab_size))
        return {token: id_ for token, id_ in tokens if token is not None}

    @property
    def vocab_size(self) -> int:
        """The number of tokens without those that were added to the model's vocabulary."""
        return self._tokenizer.model_vocab_size

    @property
    def all_special_tokens(self) -> list[str]:
        """The named tokens, and all others that the tokenizer's files declare special."""
        named = (text for text in self._named.values() if text is not None)
        return list(dict.fromkeys([*named, *self._tokenizer.declared_special]))

    @property
    def all_special_ids(self) -> list[int]:
        """Their ids."""
        return [self._ids[text] for text in self.all_special_tokens if text in self._ids]

    def get_vocab(self) -> dict[str, int]:
        """The id of every token."""
        return dict(self._ids)

    def get_added_vocab(self) -> dict[str, int]:
        """The ids of the tokens that were added to the model's vocabulary."""
        return dict(sorted(self._tokenizer.added_tokens.items(), key=lambda pair: pair[1]))


class HuggingFaceTokenizer(NamedTokens):
    """The tokenizer of a model. Raises RequestError for what it does not do, with the remedy."""

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = None,
        **idle: Any,
    ) -> Encoding:
        """Ids of a text, or of a list of texts.

        padding: True or "longest" makes all as long as the longest, by `pad_token`. return_tensors:
        "pt" or "np" for an array of them.
        """
        _refuse(text_pair=text_pair, **idle)
        single = isinstance(text, str)
        texts = [text] if isinstance(text, str) else text
        rows = [self._tokenizer.encode(each, add_special_tokens) for each in texts]
        encoding = self._batch(
            rows, padding, padding_side or self.padding_side, return_tensors, single
        )
        if return_attention_mask is False:
            del encoding["attention_mask"]
        return encoding

    def encode(self, text: str, add_special_tokens: bool = True, **more: Any) -> Any:
        """Ids of a text; further arguments as of a call."""
        return self(text, add_special_tokens=add_special_tokens, **more)["input_ids"]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The tokens of a text, in the vocabulary's spelling."""
        return self.convert_ids_to_tokens(self._tokenizer.encode(text, add_special_tokens))

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **idle: Any) -> Any:
        """Text of ids, or a list of texts of a list of ids; one id is taken too."""
        _refuse(**idle)
        ids = _plain(token_ids)
        if isinstance(ids, int):
            ids = [ids]
        if any(isinstance(each, list | tuple) for each in ids):
            return [self._tokenizer.decode(each, skip_special_tokens) for each in ids]
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Any, skip_special_tokens: bool = False, **idle: Any
    ) -> list[str]:
        """The text of each sequence of ids."""
        return [self.decode(each, skip_special_tokens, **idle) for each in _plain(sequences)]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The token of an id, or those of a list."""
        ids = _plain(ids)
        if isinstance(ids, int):
            return self._tokenizer.token(ids)
        special = {*self.all_special_ids} if skip_special_tokens else set()
        return [self._tokenizer.token(each) for each in ids if each not in special]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token, or those of a list; an unknown one is `unk_token_id`."""
        if isinstance(tokens, str):
            return self._ids.get(tokens, self.unk_token_id)
        return [self._ids.get(token, self.unk_token_id) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        return self._tokenizer.decode(self.convert_tokens_to_ids(tokens), False)

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        template = self._tokenizer.chat_template
        return None if template is None else template.source

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        padding: bool | str = False,
        return_tensors: str | None = None,
        return_dict: bool = True,
        **more: Any,
    ) -> Any:
        """A conversation, or a list of them, as ids, or as text where `tokenize` is False.

        return_dict: as an `Encoding`, else the ids alone. Other keywords are the template's
        variables, JSON values by name. tools: declarations of functions, as in the chat API.
        """
        idle = {name: more.pop(name, None) for name in _IDLE if name in more}
        _refuse(documents=documents, **idle)
        use = read_tools(tools)
        source = self._tokenizer
        if chat_template is not None:
            source = source.with_chat_template(chat_template)
        single = not conversation or isinstance(conversation[0], Mapping)
        talks = [conversation] if single else conversation
        named: dict[str, Any] = {
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": more or None,
            "tools": None if use is None else use.declared(),
        }
        if not tokenize:
            texts = [source.render_chat(talk, add_generation_prompt, **named) for talk in talks]
            return texts[0] if single else texts
        rows = [source.apply_chat_template(talk, add_generation_prompt, **named) for talk in talks]
        encoding = self._batch(rows, padding, self.padding_side, return_tensors, single)
        return encoding if return_dict else encoding["input_ids"]

    def _batch(
        self,
        rows: list[list[int]],
        padding: bool | str,
        side: str,
        tensors: str | None,
        single: bool,
    ) -> Encoding:
        """Rows as they are asked for; single: a text alone, whose row stands in no list."""
        masks = [[1] * len(row) for row in rows]
        if padding in (True, "longest"):
            if self.pad_token_id is None:
                raise RequestError("padding needs a pad_token: set tokenizer.pad_token first")
            width = max(map(len, rows), default=0)
            rows = [_padded(row, width, self.pad_token_id, side) for row in rows]
            masks = [_padded(mask, width, 0, side) for mask in masks]
        elif padding not in (False, "do_not_pad"):
            raise RequestError(f"padding {padding!r} is not supported: use True or False")
        if single and tensors is None:
            return Encoding(input_ids=rows[0], attention_mask=masks[0])
        return Encoding(input_ids=_array(rows, tensors), attention_mask=_array(masks, tensors))


_IDLE = (
    "truncation", "max_length", "sanitize_control_tokens", "tokenizer_kwargs",
    "return_assistant_tokens_mask",
)  # fmt: skip


def _refuse(**idle: Any) -> None:
    """Raise RequestError for an argument of transformers' that asks for something."""
    for name, value in idle.items():
        if name != "verbose" and value not in (None, False, 0, [], {}):
            raise RequestError(
                f"{name} {value!r:.60} is not supported: leave it out, or load transformers' own "
                "tokenizer from the model's directory",
                name,
            )


def _plain(ids: Any) -> Any:
    return ids.tolist() if hasattr(ids, "tolist") else ids


def _padded(row: list[int], width: int, filler: int, side: str) -> list[int]:
    more = [filler] * (width - len(row))
    return more + row if side == "left" else row + more


def _array(rows: list[list[int]], tensors: str | None) -> Any:
    """`rows` themselves, or an array. Raises RequestError for rows of several lengths."""
    if tensors is None:
        return rows
    if len({*map(len, rows)}) > 1:
        raise RequestError(f"return_tensors {tensors!r} needs rows of one length: give padding")
    if tensors == "pt":
        import torch

        return torch.tensor(rows, dtype=torch.int64)
    if tensors == "np":
        import numpy as np

        return np.array(rows, dtype=np.int64)
    raise RequestError(f"return_tensors {tensors!r} is not supported: use 'pt' or 'np'")
