"""The `tokenizer.json` and the chat template that a GGUF file stands for.

Two kinds are known: byte-level BPE ("gpt2"), whose file names how text is split before merging, and
SentencePiece's ("llama"), whose merges follow from the scores of its tokens.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

from tpdet.errors import CheckpointError
from tpdet.gguf_file.header import GgufHeader, read_header

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_PREFIX = "tokenizer.ggml."
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_LLAMA_3 = [rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}{_REST}"]
_SPLITS: dict[str, list[str]] = {
    "gpt-2": [],
    "smollm": ["digits"],
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "qwen2": [rf"{_CONTRACTION}|{_WORD}|\p{{N}}{_REST}"],
    "tekken": [_TEKKEN],
}
"""By `tokenizer.ggml.pre`: expressions that split a text before GPT-2's own, or in its place."""

_WHOLE_WORDS = ("llama-bpe", "llama3", "tekken")  # a piece that is a token needs no merges
_NORMALIZED = ("qwen2",)
_WITH_BEGIN = ("llama-bpe", "llama3", "tekken")  # where `add_bos_token` is absent


def read_gguf_tokenizer(path: Path) -> tuple[str, dict[str, Any], str | None]:
    """(`tokenizer.json`, the object of `tokenizer_config.json`, the chat template or None).

    Raises CheckpointError naming the field for a tokenizer that is not known, and as `read_header`.
    """
    header = read_header(path)
    tokens, kinds = _list(header, "tokens", str), _list(header, "token_type", int)
    if len(kinds) != len(tokens):
        _refuse(header, "token_type", f"it has {len(kinds)} entries for {len(tokens)} tokens")
    model = header.metadata.get(f"{_PREFIX}model")
    if model == "gpt2":
        description = _byte_level(header, tokens, kinds)
    elif model == "llama":
        description = _sentence_piece(header, tokens, kinds)
    else:
        _refuse(header, "model", f"it is {model!r}, only gpt2 and llama are supported")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for ours, theirs in _NAMED.items():
        named = _id(header, ours, tokens)
        if named is not None:
            config[theirs] = tokens[named]
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path.name}: tokenizer.chat_template is no text")
    return json.dumps(description, ensure_ascii=False), config, template


def _byte_level(header: GgufHeader, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    pre = header.metadata.get(f"{_PREFIX}pre")
    if pre not in _SPLITS:
        _refuse(header, "pre", f"it is {pre!r}, only {', '.join(_SPLITS)} are supported")
    splits: list[dict[str, Any]] = []
    for split in _SPLITS[pre]:
        pattern = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated",
                   "invert": False}  # fmt: skip
        digits = {"type": "Digits", "individual_digits": True}
        splits.append(digits if split == "digits" else pattern)
    own = not splits or splits[0]["type"] == "Digits"
    steps = [*splits, _BYTES | {"use_regex": own}]
    model = {
        "type": "BPE", "unk_token": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": pre in _WHOLE_WORDS,
        "vocab": _vocabulary(tokens, kinds), "merges": _list(header, "merges", str),
    }  # fmt: skip
    begin = _begin(header, tokens, pre in _WITH_BEGIN)
    return _described(
        tokens,
        kinds,
        model,
        normalizer={"type": "NFC"} if pre in _NORMALIZED else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        post_processor=begin or _BYTES | {"use_regex": True},
        decoder=_BYTES | {"add_prefix_space": True, "use_regex": True},
    )


def _sentence_piece(header: GgufHeader, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    scores = _list(header, "scores", float)
    if len(scores) != len(tokens):
        _refuse(header, "scores", f"it has {len(scores)} entries for {len(tokens)} tokens")
    unknown = _id(header, "unknown", tokens)
    model = {
        "type": "BPE", "unk_token": None if unknown is None else tokens[unknown],
        "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
        "vocab": _vocabulary(tokens, kinds), "merges": _merges(tokens, scores),
    }  # fmt: skip
    space = bool(header.metadata.get(f"{_PREFIX}add_space_prefix", True))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _described(
        tokens,
        kinds,
        model,
        normalizer={"type": "Sequence", "normalizers": [prepend, replace] if space else [replace]},
        pre_tokenizer=None,
        post_processor=_begin(header, tokens, True),
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _described(
    tokens: list[str], kinds: list[int], model: dict[str, Any], **parts: Any
) -> dict[str, Any]:
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "model": model,
        **parts,
    }


def _vocabulary(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Tokens up to the last plain one: those behind it, such as control tokens, are added ones."""
    last = max((i for i, kind in enumerate(kinds) if kind in (_NORMAL, _BYTE)), default=-1)
    return {token: index for index, token in enumerate(tokens[: last + 1])}


def _merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Pairs of tokens that make a token, best score first, as SentencePiece merges them."""
    ids = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    return [[tokens[left], tokens[right]] for _, _, left, right in sorted(found)]


def _begin(header: GgufHeader, tokens: list[str], default: bool) -> dict[str, Any] | None:
    """The post-processor that puts the first token before a text; None if nothing is added."""
    begin = _id(header, "bos", tokens)
    if begin is None or not header.metadata.get(f"{_PREFIX}add_bos_token", default):
        return None
    token = tokens[begin]
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [begin], "tokens": [token]}},
    }


def _id(header: GgufHeader, name: str, tokens: list[str]) -> int | None:
    field = f"{name}_token_id"
    value = header.metadata.get(f"{_PREFIX}{field}")
    if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
        _refuse(header, field, f"it is {value!r}, ids are below {len(tokens)}")
    return value


def _list(header: GgufHeader, field: str, of: type) -> list[Any]:
    value = header.metadata.get(f"{_PREFIX}{field}")
    if not isinstance(value, list) or not all(type(each) is of for each in value):
        _refuse(header, field, f"it must be a list of {of.__name__}: give --tokenizer a directory")
    return value


def _refuse(header: GgufHeader, field: str, reason: str) -> NoReturn:
    raise CheckpointError(f"{header.path.name}: {_PREFIX}{field}: {reason}")
