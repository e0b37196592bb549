"""The `tokenizer.json` and the chat template that a GGUF file stands for.

Two kinds are known: byte-level BPE ("gpt2"), whose file names how text is split before merging, and
SentencePiece's ("llama"), whose merges follow from the scores of its tokens.
"""

import json
import math
from pathlib import Path
from typing import Any

from tpdet.checkpoint.gguf.config import metadata
from tpdet.checkpoint.gguf.header import read_header
from tpdet.checkpoint.model_config.fields import Fields

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_PREFIX = "tokenizer.ggml."
_MODEL, _PRE, _TOKENS, _KINDS, _SCORES, _MERGES = (
    f"{_PREFIX}{each}" for each in ("model", "pre", "tokens", "token_type", "scores", "merges")
)
_TEMPLATE = "tokenizer.chat_template"
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
_QWEN_2 = [rf"{_CONTRACTION}|{_WORD}|\p{{N}}{_REST}"]
_WITH_MARKS = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, list[str]] = {
    "gpt-2": [],
    "smollm": ["digits"],
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "qwen35": [rf"{_CONTRACTION}|{_WITH_MARKS}"],
    "tekken": [_TEKKEN],
}
"""By `tokenizer.ggml.pre`: expressions that split a text before GPT-2's own, or in its place."""

_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a piece that is a token is whole
_NORMALIZED = ("qwen2", "deepseek-r1-qwen", "qwen35")
_WITH_BEGIN = _WHOLE_WORDS  # where `add_bos_token` is absent

_LONGEST_TOKEN = 1 << 10  # characters; published vocabularies have up to some 200
_MOST_CHARACTERS = 1 << 23  # of all tokens; the largest published vocabularies have 2^21
_MOST_MERGES = 1 << 21  # the largest published vocabularies have 2^19
_ANOTHER = "give --tokenizer DIR with the files of this tokenizer"


def read_gguf_tokenizer(path: Path) -> tuple[str, dict[str, Any], str | None]:
    """(`tokenizer.json`, the object of `tokenizer_config.json`, the chat template or None).

    Raises CheckpointError naming the field for a tokenizer that is not known, and as `read_header`.
    """
    found = metadata(read_header(path))
    model = found.text(_MODEL)
    if model not in ("gpt2", "llama"):
        found.refuse(_MODEL, f"only gpt2 and llama are known: {_ANOTHER}")
    tokens, kinds = _tokens(found)
    make = _byte_level if model == "gpt2" else _sentence_piece
    description = make(found, tokens, kinds)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for ours, theirs in _NAMED.items():
        named = _id(found, ours, tokens)
        if named is not None:
            config[theirs] = tokens[named]
    template = found.text(_TEMPLATE) if _TEMPLATE in found else None
    return json.dumps(description, ensure_ascii=False), config, template


def _tokens(found: Fields) -> tuple[list[str], list[int]]:
    """The tokens and their kinds. Refuses other kinds, and tokens that are too long."""
    tokens = found.items(_TOKENS, str, f"it must be a list of texts: {_ANOTHER}")
    kinds = found.items(_KINDS, int, f"it must be a list of integers: {_ANOTHER}")
    if len(kinds) != len(tokens):
        found.refuse(_KINDS, f"it must have as many items as there are tokens, {len(tokens)}")
    if any(not 0 <= kind <= _BYTE for kind in kinds):
        found.refuse(_KINDS, f"its items must lie in [0, {_BYTE}]")
    longest, characters = max(map(len, tokens), default=0), sum(map(len, tokens))
    if longest > _LONGEST_TOKEN:
        found.refuse(_TOKENS, f"a token has {longest} characters, {_LONGEST_TOKEN} is the limit")
    if characters > _MOST_CHARACTERS:
        found.refuse(_TOKENS, f"they have {characters} characters, {_MOST_CHARACTERS} is the limit")
    return tokens, kinds


def _byte_level(found: Fields, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    pre = found.text(_PRE, "none")
    if pre not in _SPLITS:
        found.refuse(_PRE, f"only {', '.join(_SPLITS)} are known: {_ANOTHER}")
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
        "vocab": _vocabulary(tokens, kinds), "merges": _stored_merges(found, tokens),
    }  # fmt: skip
    around = _around(found, tokens, pre in _WITH_BEGIN)
    return _described(
        tokens,
        kinds,
        model,
        normalizer={"type": "NFC"} if pre in _NORMALIZED else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        post_processor=around or _BYTES | {"use_regex": True},
        decoder=_BYTES | {"add_prefix_space": True, "use_regex": True},
    )


def _sentence_piece(found: Fields, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    scores = found.items(_SCORES, float, f"it must be a list of numbers: {_ANOTHER}")
    if len(scores) != len(tokens):
        found.refuse(_SCORES, f"it must have as many items as there are tokens, {len(tokens)}")
    if not all(map(math.isfinite, scores)):
        found.refuse(_SCORES, "a score is NaN or infinite: download the file again")
    unknown = _id(found, "unknown", tokens)
    model = {
        "type": "BPE", "unk_token": None if unknown is None else tokens[unknown],
        "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
        "vocab": _vocabulary(tokens, kinds), "merges": _merges(found, tokens, scores),
    }  # fmt: skip
    space = found.boolean(f"{_PREFIX}add_space_prefix", True)
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
        post_processor=_around(found, tokens, True),
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


def _stored_merges(found: Fields, tokens: list[str]) -> list[list[str]]:
    """The pairs of tokens that make a token, as the file lists them."""
    known, pairs = {*tokens}, []
    for merge in found.items(_MERGES, str, f"it must be a list of texts: {_ANOTHER}"):
        left, _, right = merge.partition(" ")
        if not (left and right and left in known and right in known and left + right in known):
            found.refuse(_MERGES, f"{merge!r:.60} is no two tokens that make one: {_ANOTHER}")
        pairs.append([left, right])
    return pairs


def _merges(found: Fields, tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Pairs of tokens that make a token, best score first, as SentencePiece merges them.

    In order of the alphabet the beginnings of a token that are tokens lie before it, each the
    beginning of the next: they are `open_`, so no other place of a cut is tried.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = []
    open_: list[str] = []
    for token in sorted(ids):
        while open_ and not token.startswith(open_[-1]):
            open_.pop()
        index = ids[token]
        for left in open_:
            right = ids.get(token[len(left) :])
            if left and right is not None:
                pairs.append((-scores[index], index, ids[left], right))
        if len(pairs) > _MOST_MERGES:
            found.refuse(_TOKENS, f"they make over {_MOST_MERGES} merges, which is the limit")
        open_.append(token)
    return [[tokens[left], tokens[right]] for _, _, left, right in sorted(pairs)]


def _around(found: Fields, tokens: list[str], begins: bool) -> dict[str, Any] | None:
    """The post-processor that puts tokens before and after a text; None if nothing is added.

    begins: whether the first token is added where the file does not say it.
    """
    if found.boolean(f"{_PREFIX}add_sep_token", False):
        found.refuse(f"{_PREFIX}add_sep_token", f"it is not supported: {_ANOTHER}")
    wanted = {
        "bos": found.boolean(f"{_PREFIX}add_bos_token", begins),
        "eos": found.boolean(f"{_PREFIX}add_eos_token", False),
    }
    ids = {name: _id(found, name, tokens) for name, is_wanted in wanted.items() if is_wanted}
    added = {name: id_ for name, id_ in ids.items() if id_ is not None}
    if not added:
        return None
    texts = {name: tokens[id_] for name, id_ in added.items()}

    def part(name: str, kind: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": texts[name], "type_id": kind}}] if name in texts else []

    one, other = ({"Sequence": {"id": id_, "type_id": kind}} for kind, id_ in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*part("bos", 0), one, *part("eos", 0)],
        "pair": [*part("bos", 0), one, other, *part("eos", 1)],
        "special_tokens": {
            texts[name]: {"id": texts[name], "ids": [id_], "tokens": [texts[name]]}
            for name, id_ in added.items()
        },
    }


def _id(found: Fields, name: str, tokens: list[str]) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    return found.integer(key, low=0, high=len(tokens) - 1) if key in found else None
