r"""What a token is called in log-probabilities: one name for each id, and no name for two.

A name is the token's own text, with the blank that SentencePiece writes as "▁", wherever the token
stands. A token whose bytes are no text by themselves is called by them, as OpenAI writes it:
`bytes:\xf0\x9f`. Where several ids have the same bytes, the lowest has the text, one that is a byte
token (`<0x41>`) after all others; the next is called by its bytes, any further one `token_id:N`. So
are ids without a token or without bytes. A text that looks like one of these names is written in
bytes.
"""

import re
from collections.abc import Callable

from tpdet.text.token_bytes import DecoderRules

_LIKE_A_NAME = re.compile(r"bytes:(\\x[0-9a-f]{2})+|token_id:[0-9]+")


class TokenNames:
    """The names and bytes of one vocabulary's tokens; usable from several threads."""

    def __init__(
        self, rules: DecoderRules, vocabulary: dict[str, int], spelling: Callable[[int], str | None]
    ) -> None:
        """vocabulary: the id of each token; spelling: the token of an id, None if it has none."""
        self._rules, self._spelling = rules, spelling
        if len(set(vocabulary.values())) < len(vocabulary):  # added tokens stand for others' ids
            vocabulary = {token: id_ for token, id_ in vocabulary.items() if spelling(id_) == token}
        self._place = _places(rules, vocabulary)
        self._names: dict[int, str] = {}  # of tokens seen so far

    def name(self, token_id: int) -> str:
        """The name of an id, unlike that of every other id."""
        found = self._names.get(token_id)
        if found is None:
            found = self._names[token_id] = self._name(token_id)
        return found

    def bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds behind others, special or not; None if there is no token."""
        token = self._spelling(token_id)
        return None if token is None else self._rules.token_bytes(token, first=False)

    def _name(self, token_id: int) -> str:
        data = self.bytes(token_id)
        if not data:
            return id_name(token_id)
        names = ["bytes:" + "".join(f"\\x{byte:02x}" for byte in data)]
        text = data.decode(errors="ignore")
        if text.encode() == data and not _LIKE_A_NAME.fullmatch(text):
            names.insert(0, text)
        place = self._place.get(token_id, 0)
        return names[place] if place < len(names) else id_name(token_id)


def id_name(token_id: int) -> str:
    """The name by number."""
    return f"token_id:{token_id}"


def _places(rules: DecoderRules, vocabulary: dict[str, int]) -> dict[int, int]:
    """The place of each id among those with the same bytes, where it is not the first."""
    first: dict[str | bytes, str] = {}
    alike: dict[str | bytes, list[str]] = {}
    for token in vocabulary:
        key = rules.same_bytes(token)
        other = first.setdefault(key, token)
        if other is not token:
            alike.setdefault(key, [other]).append(token)
    found: dict[int, int] = {}
    for tokens in alike.values():
        tokens.sort(key=lambda token: (rules.is_byte_token(token), vocabulary[token]))
        found |= {vocabulary[token]: place for place, token in enumerate(tokens)}
    return found
