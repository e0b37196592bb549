"""Encodes a conversation so that no text in it becomes a special token."""

import json
import secrets
from collections.abc import Collection, Sequence
from typing import Any

import tokenizers

from tpdet.errors import RequestError
from tpdet.text.chat_template import Segment

_NONCHARACTERS = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))


class Guard:
    """A copy of a tokenizer whose special tokens have secret names, which no text can contain.

    The whole conversation is encoded at once, so every rule across tokens holds (prefix spaces,
    stripping, normalization); only the names differ. Each process makes new names; ids do not
    depend on them.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, description: dict[str, Any], special: Collection[str]
    ) -> None:
        """description: the backend as JSON; the tokens in `special` are renamed in place."""
        unknown = description["model"].get("unk_token")
        secret = "".join(_NONCHARACTERS[byte % 32] for byte in secrets.token_bytes(24))
        self._names: dict[str, str] = {}
        for index, token in enumerate(description["added_tokens"]):
            if token["content"] in special:
                # Fixed width, so that no name is the beginning of another.
                digits = "".join(_NONCHARACTERS[index >> shift & 31] for shift in (15, 10, 5, 0))
                self._names[token["content"]] = secret + digits
                token["content"] = secret + digits
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        # Names outside the model's vocabulary get other ids, and shift the ids after them.
        self._ids: dict[int, int] = {}
        for text, id_ in _added_ids(backend).items():
            renamed_id = self._backend.token_to_id(self._names.get(text, text))
            if renamed_id is not None:
                self._ids[renamed_id] = id_
        # The model itself may still make special tokens of plain text, if it has them.
        named = (self._backend.token_to_id(text) for text in self._names if text != unknown)
        self._forbidden = frozenset(id_ for id_ in named if id_ is not None)

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        """The ids; only special segments become special tokens. Raises RequestError."""
        text = "".join(self._names[s.text] if s.special else checked(s.text) for s in segments)
        ids = ids_of(self._backend, text, False)
        if not self._forbidden.isdisjoint(ids):
            raise RequestError("this tokenizer makes special tokens of plain text: reword the text")
        return [self._ids.get(id_, id_) for id_ in ids]


def ids_of(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Ids of a text; releases the GIL. Raises RequestError if the library gives up."""
    try:
        # The batch call releases the GIL, `encode` does not; without offsets it is twice as fast.
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    # A panic of Rust is no Exception. A regular expression that backtracks too often panics, for
    # example on 10 MB of blanks.
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(
            f"the tokenizer cannot split this text ({str(error)[:100]}): shorten its runs of like "
            "characters"
        ) from None


def checked(text: str) -> str:
    """`text` itself. Raises RequestError if it has a lone surrogate, which is not Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}: send Unicode text"
        ) from None
    return text


def _added_ids(backend: tokenizers.Tokenizer) -> dict[str, int]:
    return {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
