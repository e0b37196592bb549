"""Holds a model to golden answers in many circumstances; docs/golden.md quotes its figures.

    python -m scripts.golden_answers MODEL GOLDEN.json docs/results --tp 1,2,4 --flipped

The answers, of completions and chats, greedy and sampled, are recorded together at TP 1 unless the
file is there. All are checked at each size, at TP 1 also one by one in another order; there some
are generated one after another, for the ratio of the times, in which no load is. With --flipped
they meet a flipped bit of the weights. It ends with 1 if a circumstance gives another verdict than
it should.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpdet import LLM
from tpdet.tools.check.answers import Question
from tpdet.tools.check.targets import AnswerTarget, ModelTarget
from tpdet.tools.golden.golden_file import read_goldens, stored_form, write_goldens
from tpdet.tools.golden.verdicts import Verdict, verdicts
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine

ROOT = Path(__file__).resolve().parent.parent
LETTERS = 48
"""The end of a text, of so many letters, is a prompt."""
SOME = 20
"""At most so many answers are also generated one after another, and checked by a faulty memory."""
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.5, "logprobs": True},
    {"temperature": 1, "top_k": 40, "stop": ["\n\n"]},
)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "step_timeout": 600.0,
}


def questions(answers: int, tokens: int) -> list[Question]:
    """Half are completions, half chats; the texts are those of a task in the tests."""
    task = ROOT / "tests" / "accuracy" / "task" / "answers.jsonl"
    texts = [json.loads(line)["context"] for line in task.read_text().splitlines()]
    asked = []
    for index in range(answers):
        text = texts[index % len(texts)][-LETTERS:]
        body = {**KINDS[index % 4], "max_tokens": tokens}
        body["seed"] = index
        if index % 8 < 4:
            body.pop("logprobs", None)
            asked.append(Question(f"{index:03}", "/v1/completions", {"prompt": text, **body}))
        else:
            messages = [{"role": "user", "content": f"Explain: {text}"}]
            body = {"messages": messages, **body}
            asked.append(Question(f"{index:03}", "/v1/chat/completions", body))
    return asked


class Proof:
    """The rows of the results, and whether every circumstance gave the verdict that it should."""

    def __init__(self, model: str, tp: int, asked: list[Question]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.model, self.tp, self.asked, self.failed = model, tp, asked, False

    def record(self, target: AnswerTarget, file: Path) -> None:
        """Record all answers together."""
        asked, watch = self.asked, Watch()
        lines = target.record(asked)
        self._row("recorded together", watch.seconds(len(asked)), len(asked), len(asked))
        goldens = {one.name: stored_form(line) for one, line in zip(asked, lines, strict=True)}
        write_goldens(file, goldens)

    def generate(self, target: AnswerTarget, goldens: Mapping[str, Any]) -> None:
        """Generate some of the answers one after another: they are the recorded ones."""
        some = self.asked[:: max(1, len(self.asked) // SOME)]
        watch = Watch()
        alone = {one.name: stored_form(target.record([one])[0]) for one in some}
        seconds = watch.seconds(len(some))
        equal = sum(goldens[name] == golden for name, golden in alone.items())
        self._row("generated one after another", seconds, len(some), equal)
        self.expect(equal == len(some), "alone they are the same as together")

    def check(
        self, case: str, target: AnswerTarget, goldens: Mapping[str, Any], one_by_one: bool = False
    ) -> list[Verdict]:
        """Judge goldens in their order, together or one by one, and time it."""
        watch = Watch()
        if one_by_one:
            judged = [verdicts(target, {n: g}, "golden.json")[0] for n, g in goldens.items()]
        else:
            judged = verdicts(target, goldens, "golden.json")
        seconds = watch.seconds(len(goldens))
        equal = sum(verdict.equal for verdict in judged)
        self._row(case, seconds, len(judged), equal)
        for verdict in [verdict for verdict in judged if not verdict.equal][:1]:
            print(verdict.text, flush=True)
        return judged

    def expect(self, holds: bool, what: str) -> None:
        """Note whether a circumstance gave the verdict that it should."""
        self.failed |= not holds
        print("as it should be" if holds else "WRONG", "-", what, flush=True)

    def _row(self, case: str, seconds: "Seconds", answers: int, equal: int) -> None:
        row = {"case": case, "model": self.model, "dtype": "float32", "tp": self.tp}
        row |= {"context": self.asked[0].body["max_tokens"]}  # tokens of an answer, at most
        row |= {"value": round(seconds.wall, 4), "unit": "s an answer"}
        metrics: dict[str, Any] = {"answers": answers, "equal": equal}
        if self.tp == 1:
            metrics["processor_s_an_answer"] = round(seconds.processor, 4)
        self.rows.append(row | {"metrics": metrics})
        print(json.dumps(self.rows[-1]), flush=True)


class Seconds(NamedTuple):
    """Seconds by the clock, and of this process on a processor (other ranks' are not in it)."""

    wall: float
    processor: float


class Watch:
    """Measures from where it is made."""

    def __init__(self) -> None:
        self._begin = time.monotonic(), time.process_time()

    def seconds(self, count: int) -> Seconds:
        """The seconds until now, for each of so many."""
        now = time.monotonic(), time.process_time()
        return Seconds(*((b - a) / count for a, b in zip(self._begin, now, strict=True)))


def shuffled(goldens: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The same goldens in another order."""
    names = [*goldens]
    random.Random(seed).shuffle(names)
    return {name: goldens[name] for name in names}


def flip_bit_in_memory(llm: Any) -> None:
    """Flip a bit of one loaded weight, behind the model's digest: what a faulty memory does."""
    weight = llm.engine.runner.model.layers[0].norms[0].weight
    weight.view(torch.int32)[7] ^= 1 << 12


def with_flipped_bit(model: Path, folder: Path) -> Path:
    """A copy of the file, a bit in its middle flipped: what a faulty download does."""
    copy = folder / model.name
    shutil.copy(model, copy)
    with copy.open("r+b") as file:
        file.seek(model.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return copy


def check_at_one(proof: Proof, model: Path, goldens: Mapping[str, Any]) -> None:
    """The circumstances of TP 1."""
    with LLM(model, **SETTINGS) as llm:
        target, other = ModelTarget(llm), shuffled(goldens, 1)
        judged = proof.check("checked together, cold cache", target, goldens)
        proof.generate(target, goldens)
        judged += proof.check("checked one by one, other order, warm cache", target, other, True)
        proof.expect(all(verdict.equal for verdict in judged), "all pass at TP 1")


def check_flipped(proof: Proof, model: Path, goldens: Mapping[str, Any]) -> None:
    """A flipped bit, in memory and in the file."""
    some = dict([*goldens.items()][:: max(1, len(goldens) // SOME)])
    with LLM(model, **SETTINGS) as llm:
        flip_bit_in_memory(llm)
        judged = proof.check("some, a flipped bit in memory", ModelTarget(llm), some)
        differ = not any(verdict.equal for verdict in judged)
        proof.expect(differ, "each fails where a bit in memory is flipped")
    with tempfile.TemporaryDirectory() as folder:
        with LLM(with_flipped_bit(model, Path(folder)), **SETTINGS) as llm:
            judged = proof.check("all, a flipped bit in the file", ModelTarget(llm), goldens)
        refused = not any(verdict.equal or verdict.comparable for verdict in judged)
        proof.expect(refused, "none can be compared where a bit of the file is flipped")


def main() -> int:
    """Print and record a row for each circumstance; 1 if a verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("golden", type=Path, help="the golden file, written if it is not there")
    parser.add_argument("results", type=Path, help="a folder of results files")
    parser.add_argument("--tp", default="1,2,4", help="sizes; none records alone")
    parser.add_argument("--flipped", action="store_true", help="also by flipped bits")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8, help="of each answer, at most")
    options = parser.parse_args()
    asked = questions(options.answers, options.tokens)
    proofs = []
    if not options.golden.exists():
        proofs.append(Proof(options.model.name, 1, asked))
        with LLM(options.model, **SETTINGS) as llm:
            proofs[0].record(ModelTarget(llm), options.golden)
    goldens = read_goldens(options.golden)
    for tp in map(int, filter(None, options.tp.split(","))):
        proofs.append(proof := Proof(options.model.name, tp, asked))
        if tp == 1:
            check_at_one(proof, options.model, goldens)
            continue
        with LLM(options.model, **SETTINGS, tensor_parallel_size=tp) as llm:
            target, other = ModelTarget(llm), shuffled(goldens, tp)
            judged = proof.check("checked together, other order", target, other)
        proof.expect(all(verdict.equal for verdict in judged), f"all pass at TP {tp}")
    if options.flipped:
        proofs.append(proof := Proof(options.model.name, 1, asked))
        check_flipped(proof, options.model, goldens)
    rows = [row for proof in proofs for row in proof.rows]
    sizes = f"--tp {options.tp} --answers {options.answers} --tokens {options.tokens}"
    command = f"scripts.golden_answers SmolLM2 {sizes}"
    append_run(options.results, "golden", machine("cpu", 1), command, rows)
    return int(any(proof.failed for proof in proofs))


if __name__ == "__main__":
    sys.exit(main())
