"""A lower bound on the number of tokens of a text, from its size alone.

If no step of a tokenizer drops or merges characters, and each token stands for at most L bytes, a
text of B bytes has at least B / L tokens. So a text that cannot fit is refused at once, without
seconds of work. There is no bound for a tokenizer that may drop characters, or make one token of a
whole unknown word.
"""

from collections.abc import Mapping
from typing import Any

from tpdet.text.token_bytes import byte_of_character

# NFC makes a text at most 3.5 times shorter (ΐ of Greek iota and two marks, each spelled by its
# longest singleton); composition is frozen by Unicode, and a test goes through all characters.
NFC_SHRINKS = 4


def bytes_per_token(description: Mapping[str, Any]) -> int | None:
    """The most bytes of a token's text, None if unbounded; description: of `tokenizer.json`."""
    shrinks = _shrinks(description.get("normalizer"))
    splits = _kinds(description.get("pre_tokenizer"))
    model = description["model"]
    if shrinks is None or splits is None or model.get("type", "BPE") != "BPE":
        return None
    byte_level = "ByteLevel" in splits
    if not _knows_every_byte(model, byte_level):
        return None
    longest = 1
    for token in description.get("added_tokens", ()):
        if token.get("lstrip") or token.get("rstrip"):
            return None  # it includes any number of blanks
        # The normalized text, where this token is searched, may have longer letters.
        longest = max(longest, len(token["content"].encode()) * (3 if token["normalized"] else 1))
    for token in model["vocab"]:
        longest = max(longest, len(token) if byte_level else len(token.encode()))
    return longest * shrinks


def _knows_every_byte(model: Mapping[str, Any], byte_level: bool) -> bool:
    """Whether no byte is dropped or merged with other unknown bytes."""
    vocabulary = model["vocab"]
    if byte_level:
        return all(character in vocabulary for character in byte_of_character())
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return bool(model.get("byte_fallback")) and all(name in vocabulary for name in names)


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [found for step in part[inner] for found in _steps(step, inner)]
    return [part]


def _shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """How many times shorter the normalizer makes a text, at most; None if unknown."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        if step["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif step["type"] == "Replace":
            old = len(step["pattern"].get("String", "").encode())
            if not 0 < old <= len(step["content"].encode()) <= 3 * old:
                return None
        elif step["type"] != "Prepend":
            return None
    return factor


def _kinds(splits: Mapping[str, Any] | None) -> set[str] | None:
    """The kinds of the steps that split a text; None if one of them may drop characters."""
    found = set()
    for step in _steps(splits, "pretokenizers"):
        kind = step["type"]
        if kind not in ("ByteLevel", "Metaspace", "Split", "Digits"):
            return None
        if kind == "Split" and step.get("behavior") == "Removed":
            return None
        found.add(kind)
    return found
