"""Recorded answers for tests: true ones, by a model here, and true ones with one field changed."""

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from tpdet.audit.replay import VERSION, replay_digest
from tpdet.llm.llm import LLM
from tpdet.requests.answer.json_pieces import json_pieces
from tpdet.requests.answer.prompt_scores import PromptScores, parts_of
from tpdet.requests.answer.whole_answer import WholeAnswer, origin, receipt
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.work import prepare_call
from tpdet.requests.request import with_seed
from tpdet.text.reasoning import ReasoningParser
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
    facts = ModelCheck(llm).facts
    preparer = Preparer(facts, "tiny", llm.tokenizer)
    call = prepare_call("chat" if url == CHATS else "completion", preparer, body, "7")
    seed = body.get("seed", seed)
    requests = tuple(with_seed(request, seed) for request in call.requests)
    call = dataclasses.replace(call, requests=requests)
    parser = ReasoningParser.of("auto", llm.tokenizer) if split else None
    whole = WholeAnswer(call, llm.tokenizer, parser)
    llm.recompute([*whole.assemblers.values()], use_tqdm=False)
    for name, assembler in whole.assemblers.items():
        if assembler.prompt is not None:
            whole.prompts[name] = PromptScores()
            for part in parts_of(assembler.prompt):
                whole.prompts[name].add(part)
    names = facts.contract, facts.model_digest
    digest = replay_digest(call.requests, whole.tokens(), seed, *names)
    told = receipt(origin(call, *names), seed, digest, VERSION)
    answer = json.loads("".join(json_pieces(whole.body(seed, facts.system_fingerprint, told))))
    response = {"status_code": 200, "request_id": answer["id"], "body": answer}
    return {
        "id": "batch_req_0",
        "custom_id": "a",
        "response": response,
        "error": None,
        "request": {"url": url, "body": body},
    }


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
