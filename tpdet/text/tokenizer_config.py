"""Reads the texts of the tokens that `tokenizer_config.json` names, in either of its two forms."""

from collections.abc import Mapping
from typing import Any

from tpdet.errors import CheckpointError, RequestError
from tpdet.text.token_guard import checked


def named_text(config: Mapping[str, Any], name: str) -> str | None:
    """The text of a named token such as `bos_token`; None if there is none."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if value is not None and not isinstance(text, str):
        raise CheckpointError(
            f"tokenizer_config.json: {name} is {str(value)[:40]!r}: it must be text"
        )
    return text_of_token(value)


def text_of_token(token: object) -> str | None:
    """A token's text; the token is a string, or an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    if not isinstance(value, str) or not value:
        return None
    try:
        return checked(value)
    except RequestError as error:
        raise CheckpointError(f"tokenizer_config.json: token {value!r}: {error}") from None


def more_special(config: Mapping[str, Any]) -> list[str]:
    """The special tokens without a name, in the file's order."""
    found = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or []
        if not isinstance(value, dict | list):
            raise CheckpointError(
                f"tokenizer_config.json: {key} is a {type(value).__name__}: it must be a list"
            )
        found += list(value.values()) if isinstance(value, dict) else value
    return [text for token in found if (text := text_of_token(token))]
