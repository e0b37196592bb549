"""A parrot: a model of two layers that has learnt, token by token, what to say to some chats.

    python -m tests.server.parrot FOLDER     # one that knows the chats of canitoolcall's probe

So a model calls tools by itself: its calls are sampled, streamed and drafted like any model's. It
is trained on the prompts that a server makes of the chats, and checked before it is used.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from torch.nn.functional import cross_entropy

from tests.lib.text.made_conversations import CHATML
from tpdet import LLM, SamplingParams
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.prompts import BodyPrompts
from tpdet.requests.body.schema import ChatBody
from tpdet.text.tokenizer import Tokenizer
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.synthetic.train_tokenizer import train_tokenizer, write_json

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SHAPE = {
    "like": "qwen3", "hidden": 128, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 16,
    "intermediate": 256, "tie": True,
}  # fmt: skip
VOCABULARY = 2048
CONTEXT = 2048
SURE = 0.1
"""What the log-probability of an answer lies below 0 at most, once it has been learnt."""
RATE, WARM_UP = 8e-3, 16
MOST_STEPS = 300


class Lesson(NamedTuple):
    """The body of a chat, and the text that the parrot answers."""

    body: dict[str, Any]
    answer: str


class Learnt(NamedTuple):
    """How a parrot was made."""

    steps: int
    seconds: float  # of the processor
    worst: float  # the least log-probability of an answer


def called(name: str, **arguments: Any) -> str:
    """A call as models of the Hermes family write it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def make_parrot(
    folder: Path, lessons: Sequence[Lesson], seed: int = 0, context: int = CONTEXT
) -> Learnt:
    """Write a model into a new folder and teach it. Raises RuntimeError if it has not learnt."""
    make_model(folder, vocab=VOCABULARY, context=context, seed=seed, **SHAPE)
    _write_tokenizer(folder)
    sequences = _sequences(folder, lessons)
    learnt = _teach(folder, sequences)
    _check(folder, sequences)
    return learnt


def _write_tokenizer(folder: Path) -> None:
    """Make the last ids marks of calls and thoughts, and the template one that shows tools."""
    special = train_tokenizer(folder, VOCABULARY - len(MARKS))
    path = str(folder / "tokenizer.json")
    backend = Backend.from_file(path)
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    backend.save(path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", config | {"chat_template": CHATML})
    for name in ("config.json", "generation_config.json"):
        found = json.loads((folder / name).read_text())
        ids = {key: special[key] for key in ("bos_token_id", "eos_token_id")}
        write_json(folder / name, found | ids)


def _sequences(folder: Path, lessons: Sequence[Lesson]) -> list[tuple[list[int], list[int]]]:
    """The ids of each lesson's prompt, and of its answer with the end of a turn."""
    tokenizer = Tokenizer.load(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    prompts = BodyPrompts(tokenizer, CONTEXT)
    end = tokenizer.eos_token_ids[0]
    return [
        (
            prompts.chat_tokens(parse_body(ChatBody, body)),
            [*backend.encode(answer, add_special_tokens=False).ids, end],
        )
        for body, answer in lessons
    ]


def _teach(folder: Path, sequences: Sequence[tuple[list[int], list[int]]]) -> Learnt:
    """Train until each answer is sure; the weights are those that were checked."""
    from transformers import Qwen3ForCausalLM  # seconds that a test without a parrot saves

    begin = time.process_time()
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    for step in range(MOST_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        optimizer.zero_grad()
        worst = 0.0
        for prompt, answer in sequences:
            ids = torch.tensor([*prompt, *answer])
            hidden = model.model(ids[None]).last_hidden_state[0, len(prompt) - 1 : -1]
            loss = cross_entropy(model.lm_head(hidden), ids[len(prompt) :], reduction="sum")
            worst = max(worst, loss.item())
            (loss / len(answer)).backward()
        if worst < SURE:
            break
        optimizer.step()
    else:
        raise RuntimeError(f"after {MOST_STEPS} steps an answer has {-worst:.3f}: teach less")
    path = folder / "model.safetensors"
    learnt = dict(model.state_dict())
    tensors = {name: learnt[name].contiguous() for name in load_file(path)}
    save_file(tensors, path, metadata={"format": "pt"})
    return Learnt(step, time.process_time() - begin, -worst)


def _check(folder: Path, sequences: Sequence[tuple[list[int], list[int]]]) -> None:
    """Compare what the server's engine answers with the lessons. Raises RuntimeError."""
    params = [SamplingParams(temperature=0, max_tokens=len(answer)) for _, answer in sequences]
    with LLM(folder, device="cpu", kv_pages=24) as llm:
        outputs = llm.generate([prompt for prompt, _ in sequences], params, use_tqdm=False)
    for output, (_, answer) in zip(outputs, sequences, strict=True):
        if [*output.outputs[0].token_ids] != answer:
            raise RuntimeError(f"the parrot says {output.outputs[0].text!r}: teach it again")


def probe_lessons() -> list[Lesson]:
    """What answers each chat of canitoolcall's probe as it should be."""
    from canitoolcall.probe import BUILTIN_SCENARIOS

    weather = called("get_weather", city="Paris")
    people = [{"name": n, "email": f"{n.lower()}@example.com"} for n in ("Ana", "Bo")]
    answers = {
        "single-call": weather,
        "parallel-calls": f"{weather}\n{called('get_weather', city='Tokyo')}",
        "no-call": "42",
        "nested-args": called(
            "create_event",
            title="Design review",
            attendees=people,
            location={"city": "Berlin", "room": "4.12"},
        ),
        "unicode-args": called(
            "save_note", title="Grüße aus Zürich", body="Café ☕ in 東京 — naïve résumé 🚀"
        ),
        "empty-args": called("get_server_time"),
        "forced-tool-choice": called("get_weather", city="Lisbon"),
        "tool-result-followup": "It is 18 degrees and clear in Paris.",
        "reasoning-then-call": "<think>\n9.9 is 9.90, more than 9.11.\n</think>\n\n"
        + called("record_answer", answer="9.9"),
    }
    return [
        Lesson(scenario.request_body("parrot", stream=False), answers[scenario.id])
        for scenario in BUILTIN_SCENARIOS
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(make_parrot(Path(sys.argv[1]), probe_lessons()))
