"""The tokens that the files beside `tokenizer.json` declare, read as transformers 5 reads them.

`tokenizer_config.json` names tokens (`bos_token`, `image_token`, those that transformers writes in
`model_specific_special_tokens`), lists more (`extra_special_tokens`, formerly
`additional_special_tokens`) and describes some by id (`added_tokens_decoder`). Only where it
describes none do the older files count: `special_tokens_map.json`, which then has the last word,
and `added_tokens.json`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tpdet.errors import CheckpointError, RequestError
from tpdet.text.token_guard import checked
from tpdet.text.tokenizer_file import check_length, steps

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
         "mask_token")  # fmt: skip
_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_SPECIFIC = "model_specific_special_tokens"
_BY_ID, _TYPE = "added_tokens_decoder", "__type"  # the latter marks what is not special by itself
_PREFIXING = ("GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer",
              "RobertaTokenizer")  # fmt: skip
"""Classes of transformers whose `add_prefix_space` is what their file says."""


Token = str | AddedToken
"""A text is a special token with no other flag."""


@dataclass(frozen=True)
class DeclaredTokens:
    """named: by name, in order of their ids if they are new, as are `extra`; by_id: by stated id.

    described: the flags in `by_id` hold over those of `tokenizer.json`.
    """

    named: dict[str, Token]
    extra: list[Token]
    by_id: dict[int, Token]
    described: bool

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        special_map: Mapping[str, Any] | None = None,
        added: Mapping[str, Any] | None = None,
    ) -> "DeclaredTokens":
        """What the objects in the files declare.

        config: of `tokenizer_config.json`; special_map: of `special_tokens_map.json`; added: of
        `added_tokens.json`. Raises CheckpointError naming the file and the token.
        """
        described = config.get(_BY_ID) is not None
        older = {} if described else dict(special_map or {})
        named, listed, late = _unnamed(config, older)
        named = _named(config, older) | _present(
            {name: _token(token, f"{_CONFIG}: {name}") for name, token in named.items()}
        )
        extra, late = ([t for x in part if (t := _token(x, _LISTS[1]))] for part in (listed, late))
        special = {str(token) for name, token in named.items() if described or name in NAMED}
        if described:
            by_id = _described(config[_BY_ID], special)
        else:
            by_id = _of_older(added or {}, special | {*map(str, extra)})
        return cls(named, extra + late, dict(by_id), described)

    @property
    def texts(self) -> list[str]:
        """The texts of all of them, each once."""
        tokens = (*self.by_id.values(), *self.named.values(), *self.extra)
        return list(dict.fromkeys(map(str, tokens)))

    def add_to(self, backend: Tokenizer) -> None:
        """Add them to what `tokenizer.json` made, with the ids and flags that transformers gives.

        Raises CheckpointError where a file states another id, or names an end or a beginning that
        no file has as a token.
        """
        present = backend.get_added_tokens_decoder()
        by_id = {**self.by_id, **({} if self.described else present)}
        tokens: list[Token] = [by_id[id_] for id_ in sorted(by_id)]
        known = {str(token) for token in (*present.values(), *tokens)}
        anywhere = known.union(map(str, self.extra))
        for name in ("bos_token", "eos_token"):
            text = str(self.named.get(name, ""))
            if text and text not in anywhere and backend.token_to_id(text) is None:
                raise CheckpointError(
                    f"{_CONFIG}: {name} {text!r} is not in tokenizer.json: use files of one "
                    "checkpoint"
                )
        alike: dict[str, list[Token]] = {}
        for token in (*self.named.values(), *self.extra):
            if str(token) not in known and token not in alike.setdefault(str(token), []):
                alike[str(token)].append(token)
                tokens.append(token)
        special = {token.content for token in present.values() if token.special}
        special.update(map(str, self.named.values()))
        # In one call, because each call goes through all added tokens.
        backend.add_tokens([_with_flags(token, str(token) in special) for token in tokens])
        for id_, token in self.by_id.items():
            found = backend.token_to_id(str(token))
            if found != id_:
                raise CheckpointError(
                    f"{_CONFIG if self.described else _ADDED}: token {str(token)!r} has id "
                    f"{id_}, by tokenizer.json it is {found}: use files of one checkpoint"
                )


def check_settings(config: Mapping[str, Any], pre_tokenizer: object) -> None:
    """Refuse (CheckpointError) settings of `tokenizer_config.json` that are not kept here.

    pre_tokenizer: the object in `tokenizer.json`.
    """
    if config.get("split_special_tokens"):
        raise CheckpointError(
            f"{_CONFIG}: split_special_tokens is true, so that no text has special tokens, not "
            "even a chat template's: set it to false"
        )
    prefixes, kind = config.get("add_prefix_space"), str(config.get("tokenizer_class"))
    if not isinstance(prefixes, bool) or kind.removesuffix("Fast") not in _PREFIXING:
        return
    for step in steps(pre_tokenizer, "pretokenizers"):
        found = step.get("add_prefix_space")
        if step.get("type") == "ByteLevel" and found is not prefixes:
            raise CheckpointError(
                f"{_CONFIG}: {kind} has add_prefix_space {json.dumps(prefixes)}, in tokenizer.json "
                f"it is {json.dumps(found)}: set both alike"
            )


def _unnamed(
    config: Mapping[str, Any], older: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Tokens of the lists: with a name, without one, and those that only the older file lists."""
    for source, file in ((config, _CONFIG), (older, _MAP)):
        for key in _LISTS:
            value = source.get(key)
            if value is not None and not isinstance(value, dict | list):
                raise CheckpointError(
                    f"{file}: {key} is a {type(value).__name__}: it must be a list"
                )
    former, current = _LISTS
    newer = config.get(current) or config.get(former, config.get(current))
    theirs = older.get(current, newer)
    named = {**(newer if isinstance(newer, dict) else {})}
    as_text = (name for name, value in config.items() if isinstance(value, str))
    if not named and not any(_is_named(name, config[name]) for name in as_text):
        named = _specific(config)
    listed = newer if isinstance(newer, list) else []
    if isinstance(theirs, dict):
        named, listed = named | theirs, []
    elif current in older:
        listed = [] if theirs is None else [*listed, *theirs]
    late = older.get(former) or []
    return named, listed, [] if isinstance(theirs, list) or isinstance(late, dict) else late


def _specific(config: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens by name that count where `tokenizer_config.json` names none elsewhere."""
    value = config.get(_SPECIFIC) or {}
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{_CONFIG}: {_SPECIFIC} is a {type(value).__name__}: it must be an object"
        )
    return {**value}


def _named(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Token]:
    """The tokens of all keys such as `bos_token` and `image_token`, in the order of new ids."""
    found: dict[str, Token | None] = {}
    for name in NAMED:
        file, value = (_MAP, older[name]) if name in older else (_CONFIG, config.get(name))
        if value is not None and not isinstance(_text(value), str):
            raise CheckpointError(f"{file}: {name} is {str(value)[:40]!r}: it must be text")
        if value is not None:
            found[name] = _token(value, f"{file}: {name}")
    more = [
        {name: value for name, value in part.items() if _is_named(name, value)}
        for part in (config, older)
    ]
    in_config = {name: value for name, value in more[0].items() if isinstance(value, str)}
    texts = {*in_config, *older}
    objects = {name: value for name, value in more[0].items() if name not in texts}
    for name, value in (objects | more[1] | in_config).items():
        if isinstance(value, str) or name in more[1] or _TYPE in value:
            found[name] = _token(value, name)
    return _present(found)


def _described(described: object, special: set[str]) -> Iterator[tuple[int, Token]]:
    """The tokens of `added_tokens_decoder`, objects by id; those in `special` are so anyway."""
    if not isinstance(described, dict):
        raise CheckpointError(f"{_CONFIG}: {_BY_ID} must be an object")
    for key, value in described.items():
        if not re.fullmatch("[0-9]{1,9}", key) or not isinstance(value, dict):
            raise CheckpointError(
                f"{_CONFIG}: {_BY_ID} has {key[:40]!r}: {str(value)[:40]}: it must hold objects by "
                "id"
            )
        place, text = f"{_CONFIG}: {_BY_ID}", _text(value)
        forced = {"special": True} if isinstance(text, str) and text in special else {}
        token = _token({"special": False, **value, **forced}, place)
        if token:
            yield int(key), token


def _of_older(added: Mapping[str, Any], special: set[str]) -> Iterator[tuple[int, Token]]:
    """The tokens of `added_tokens.json`, ids by text."""
    for text, id_ in added.items():
        if type(id_) is not int:
            raise CheckpointError(f"{_ADDED}: token {text!r} has id {str(id_)[:40]!r}")
        token = _token({"content": text, "special": text in special}, _ADDED)
        if token:
            yield id_, token


def _is_named(name: str, value: object) -> bool:
    """Whether it is a token with another name, such as `image_token`."""
    return name not in NAMED and name.endswith("_token") and isinstance(_text(value), str)


def _text(value: object) -> object:
    return value.get("content") if isinstance(value, dict) else value


def _token(value: object, place: str) -> Token | None:
    """A token written as text, or as an object with `content` and flags; None for no text.

    By itself it is special; what is not special is searched in normalized text.
    """
    text = _text(value)
    if not isinstance(text, str):
        raise CheckpointError(f"{place}: {str(value)[:40]!r} is no token: it must be text")
    check_length(text, place)
    try:
        checked(text)
    except RequestError as error:
        raise CheckpointError(f"{place}: token {text!r}: {error}") from None
    if not isinstance(value, dict):
        return text or None
    flags = {name: value[name] for name in _FLAGS if name in value}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise CheckpointError(f"{place}: token {text!r}: {name} is {str(flag)[:40]!r}")
    return AddedToken(text, **{"special": _TYPE not in value} | flags) if text else None


def _with_flags(token: Token, special: bool) -> AddedToken:
    """special: whatever the token itself says."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if token.special or not special:
        return token
    flags = {name: getattr(token, name) for name in _FLAGS}
    return AddedToken(token.content, **flags | {"special": True})


def _present(tokens: Mapping[str, Token | None]) -> dict[str, Token]:
    return {name: token for name, token in tokens.items() if token is not None}
