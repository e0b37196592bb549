"""Recorded answers for tests: true ones, by a model here, and true ones with one field changed."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from tpdet.llm.llm import LLM
from tpdet.tools.check.answers import Question
from tpdet.tools.check.by_model import ModelCheck
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.synthetic.train_tokenizer import train_tokenizer

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
Json = dict[str, Any]


def thinking_model(folder):
    """A tiny model whose chat template opens a block of reasoning."""
    make_model(folder, like="qwen3", kv_heads=2, hidden=256, layers=2, intermediate=384, vocab=1102)
    train_tokenizer(folder, 1100)
    for name, change in (("tokenizer", _with_marks), ("tokenizer_config", _that_thinks)):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
    return folder


def offline_line(llm: LLM, prompt, params) -> Json:
    """A line of `tpdet generate --json`."""
    outputs = llm.generate([prompt], params, use_tqdm=False)
    (record,) = llm.record(outputs, params)
    return json.loads(record.line(outputs[0]))


def batch_line(llm: LLM, url: str, body: Json, split: bool = False, seed: int = 77) -> Json:
    """A line of `tpdet run-batch --record` as a server of this model has it.

    seed: what the server draws where the body has none.
    """
    body = {"model": "tiny", "return_token_ids": True, **body}
    (line,) = ModelCheck(llm, "tiny").record_all([Question("a", url, body, seed, split)], False)
    return line


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that holds no others, by its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def changed(value: Any) -> Any:
    """Another value of the same type, where the type has one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 2  # -1 and 0 are the same top_k
    if isinstance(value, float):
        return value * 0.75 + 0.0625
    if isinstance(value, str):
        return ("0" if value[:1] != "0" else "1") + value[1:]
    return {"changed": 1} if isinstance(value, dict) else ["changed"] if value == [] else "changed"


def with_changed(line: Json, wanted: str, new: Any) -> Json:
    """The line with another value at a path."""
    found = copy.deepcopy(line)
    holder, last = found, None
    for key in wanted.replace("]", "").replace("[", ".").split("."):
        if last is not None:
            holder = holder[last]
        last = int(key) if isinstance(holder, list) else key
    holder[last] = new
    return found


def _with_marks(tokenizer: Json) -> Json:
    added = tokenizer["added_tokens"]
    for name in ("<think>", "</think>"):
        added.append({**added[-1], "id": added[-1]["id"] + 1, "content": name, "special": False})
    return tokenizer


def _that_thinks(config: Json) -> Json:
    return config | {"chat_template": config["chat_template"] + "{{ '<think>' }}"}
