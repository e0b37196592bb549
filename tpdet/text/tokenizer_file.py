"""Checks a `tokenizer.json`, and refuses contents that would fail later.

The library accepts almost anything. Some files end the process while it loads (an id of four
billion makes an array of that length; nine steps that each write ten letters for one make a billion
letters), and others at a request.
"""

from collections.abc import Iterable, Mapping, Sized
from typing import Any

from tpdet.errors import CheckpointError

MAX_TOKEN_ID = (1 << 24) - 1
"""The largest vocabulary that `config.json` may have, less one."""

MAX_GROWTH = 64
"""How many times longer a file's replacements may make a text; real files reach 3 times."""

_MOST_STEPS = 1_000  # of a part, and items of a template of tokens; published files have under 100
_LONGEST_PATTERN = 1 << 14  # characters; published expressions have up to some 2,000
_LONGEST_ADDED = 1 << 10  # characters, 100 bytes each; published added tokens have under 100
_ITEMS = ("single", "pair")
_INNER = {
    "normalizer": "normalizers", "pre_tokenizer": "pretokenizers",
    "post_processor": "processors", "decoder": "decoders",
}  # fmt: skip
_LISTS = {"normalizer": "normalizers", "decoder": "decoders"}


def check_description(description: Mapping[str, Any], file: str) -> None:
    """Raise CheckpointError naming `file` and the part of it that cannot be served."""
    model = description.get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"{file} has no model: download it again")
    if model.get("type", "BPE") == "BPE" and model.get("continuing_subword_prefix"):
        raise CheckpointError(f"{file}: BPE with continuing_subword_prefix is not supported")
    _check_ids(model.get("vocab"), file)
    added = description.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            _check_id(token.get("content"), token.get("id"), file)
            check_length(token.get("content"), file)
    for part, inner in _INNER.items():
        _check_work(description.get(part), inner, f"{file}: the {part}")
    for part, inner in _LISTS.items():
        growth = _growth(description.get(part), inner)
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"{file}: the {part}'s replacements make a text up to {growth} times longer, "
                f"{MAX_GROWTH} times is the limit: download it again"
            )


def token_texts(description: Mapping[str, Any]) -> set[str]:
    """The tokens of a file that `check_description` has passed, as far as they are in order."""
    vocabulary, added = description["model"].get("vocab"), description.get("added_tokens")
    found = {*vocabulary} if isinstance(vocabulary, dict) else set()
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(text := token.get("content"), str):
            found.add(text)
    return found


def _check_work(part: object, inner: str, about: str) -> None:
    """Refuse a part whose steps or expressions the library would prepare for seconds."""
    for number, step in enumerate(steps(part, inner)):
        listed = [step.get(name) for name in _ITEMS]
        items = max(len(each) if isinstance(each, Sized) else 0 for each in listed)
        if number >= _MOST_STEPS or items > _MOST_STEPS:
            raise CheckpointError(f"{about} has over {_MOST_STEPS} steps: download it again")
        pattern = step.get("pattern")
        expression = pattern.get("Regex") if isinstance(pattern, dict) else None
        if isinstance(expression, str) and len(expression) > _LONGEST_PATTERN:
            raise CheckpointError(
                f"{about} has an expression of {len(expression)} characters, {_LONGEST_PATTERN} is "
                "the limit: download it again"
            )


def _check_ids(vocabulary: object, file: str) -> None:
    """Refuse ids that are out of range, or that two tokens have."""
    texts: dict[Any, str] = {}
    for text, id_ in vocabulary.items() if isinstance(vocabulary, dict) else ():
        _check_id(text, id_, file)
        if texts.setdefault(id_, text) != text:
            raise CheckpointError(
                f"{file}: {texts[id_]!r} and {text!r} both have id {id_}: download it again"
            )


def _check_id(text: object, id_: object, file: str) -> None:
    if type(id_) is not int or not 0 <= id_ <= MAX_TOKEN_ID:
        raise CheckpointError(
            f"{file}: token {_shown(text)} has id {_shown(id_)}: ids are integers in "
            f"[0, {MAX_TOKEN_ID}], download it again"
        )


def check_length(text: object, file: str) -> None:
    """Refuse (CheckpointError) an added token for which every text would be searched at a cost."""
    if isinstance(text, str) and len(text) > _LONGEST_ADDED:
        raise CheckpointError(
            f"{file}: added token {_shown(text)} has {len(text)} characters, {_LONGEST_ADDED} is "
            "the limit: download it again"
        )


def _shown(value: object) -> str:
    return repr(value)[:40]


def _growth(part: object, inner: str) -> int:
    """How many times longer the replacing steps of a part make a text, at most."""
    growth = 1
    for step in steps(part, inner):
        if step.get("type") == "Replace" and isinstance(content := step.get("content"), str):
            pattern = step.get("pattern")
            old = pattern.get("String") if isinstance(pattern, dict) else None
            # A regular expression may match before every character, and at the end.
            times = -(-len(content) // len(old)) if old else 1 + len(content)
            growth *= max(1, times)
        elif step.get("type") == "Prepend" and isinstance(step.get("prepend"), str):
            growth *= 1 if len(step["prepend"]) <= 1 else len(step["prepend"])
    return growth


def steps(part: object, inner: str) -> Iterable[dict[str, Any]]:
    """The steps of a part, also those inside sequences; safe for any depth of nesting."""
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        more = step.get(inner)
        if isinstance(more, list):
            waiting += more
        else:
            yield step
