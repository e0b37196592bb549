"""Reads the results of an evaluation: the replay digest of each answer, and the tasks' versions.

A file is told by what it holds:

- lines with a digest: of `tpdet generate --json`, of `tpdet run-batch`, of OpenAI's batches, whole
  bodies of answers, and what `lm_eval_models` writes
- lm-eval's `results_*.json` (the tasks' versions) and `samples_*.jsonl` (which answers there are)
- a log of inspect-ai as JSON
- the output of promptfoo, as JSON or JSON lines, whose provider keeps `tpdet` as metadata
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tpdet.audit.replay import VERSION
from tpdet.checkpoint.model_config.json_file import json_object
from tpdet.client.input_file import numbered_lines, read_input, text_of
from tpdet.errors import CheckpointError

Json = dict[str, Any]
_REMEDY = "give the results of an evaluation (docs/golden.md)"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SAMPLES = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")
_REASONS = ("aborted", "approximate", "mixed_weights")
_SHOWN = 5


class CertifiedAnswer(NamedTuple):
    """An answer's name and replay digest; drawn: whether a server drew the seed of its noise."""

    name: str
    digest: str
    drawn: bool = False


class EvaluationResults(NamedTuple):
    """What files hold together; samples: the answers that were scored, where a file lists them."""

    answers: list[CertifiedAnswer]
    versions: dict[str, str]
    samples: set[str]


def read_results(paths: Iterable[str]) -> EvaluationResults:
    """The answers of all files together.

    Raises CheckpointError naming each answer that has no digest (the first few), a file of no
    known form, and answers and samples that are not of one evaluation; NotFoundError without a
    file.
    """
    results = EvaluationResults([], {}, set())
    wrong: list[str] = []
    for path in paths:
        _read(path, results, wrong)
    answered = {answer.name for answer in results.answers}
    if results.samples:
        missing = sorted(results.samples - answered)
        more = sorted(answered - results.samples)
        wrong += [f"sample {name} has no answer with a digest" for name in missing]
        wrong += [f"answer {name} is of no sample" for name in more]
    if wrong:
        rest = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError("; ".join(wrong[:_SHOWN]) + rest)
    if not results.answers:
        raise CheckpointError(f"there are no answers in {', '.join(paths)}: {_REMEDY}")
    return results


def _read(path: str, results: EvaluationResults, wrong: list[str]) -> None:
    data = read_input(path, _REMEDY)
    if data[:2] == b"PK":
        raise CheckpointError(
            f"{path} is a zip file: an .eval log of inspect-ai becomes JSON by "
            "inspect log convert FILE --to json --output-dir DIR"
        )
    whole = json_object(data)
    if whole is None:
        _read_lines(path, data, results, wrong)
    elif "versions" in whole and "configs" in whole:
        versions = whole["versions"]
        results.versions.update({name: str(version) for name, version in versions.items()})
    elif "eval" in whole and "plan" in whole:
        _read_inspect(path, whole, results, wrong)
    elif "evalId" in whole:
        rows = whole["results"]["results"]
        _take(path, map(_promptfoo_answer, rows), results, wrong)
    else:
        _read_lines(path, data, results, wrong)


class ReadAnswer(NamedTuple):
    """What stands where an answer's digest should: `receipt` is its `tpdet` field."""

    name: str
    receipt: Any
    why: str = "no field tpdet.replay_digest"
    drawn: bool = False


def _take(
    path: str, answers: Iterable[ReadAnswer], results: EvaluationResults, wrong: list[str]
) -> None:
    """Sort answers into those with a digest and those that are refused, by name."""
    for name, receipt, why, drawn in answers:
        receipt = receipt if isinstance(receipt, dict) else {}
        digest, version = receipt.get("replay_digest"), receipt.get("replay_version", 1)
        where = f"{path}: answer {name}"
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            reason = next((reason for reason in _REASONS if receipt.get(reason)), None)
            wrong.append(f"{where} has no digest ({reason or why})")
        elif version != VERSION:
            wrong.append(
                f"{where} has a digest of version {version}, in which a seed counts that nobody "
                f"used: ask for it again (version {VERSION})"
            )
        else:
            results.answers.append(CertifiedAnswer(name, digest, drawn))


def _read_lines(path: str, data: bytes, results: EvaluationResults, wrong: list[str]) -> None:
    task = _SAMPLES.fullmatch(Path(path).name)
    for number, line in numbered_lines(data):
        where = f"{path}, line {number}"
        try:
            fields = json.loads(text_of(line, where, _REMEDY))
        except (ValueError, RecursionError):
            raise CheckpointError(f"{where} is no JSON: {_REMEDY}") from None
        if not isinstance(fields, dict):
            raise CheckpointError(f"{where} is no object: {_REMEDY}")
        if "doc_id" in fields and "resps" in fields:
            if task is None:
                raise CheckpointError(
                    f"{path}: lm-eval's samples tell their task by the file's name: leave it as "
                    "it was, samples_TASK_DATE.jsonl"
                )
            results.samples.update(_sample_names(task[1], fields))
        else:
            _take(path, [_line_answer(fields, number)], results, wrong)


def _sample_names(task: str, sample: Json) -> Iterator[str]:
    """The names that `lm_eval_models` gives to the answers of a sample."""
    for index, responses in enumerate(sample["resps"]):
        for repeat in range(len(responses)):
            yield f"{task}/{sample['doc_id']}/{index}/{repeat}"


def _line_answer(fields: Json, number: int) -> ReadAnswer:
    if "promptIdx" in fields:
        return _promptfoo_answer(fields)
    names = (fields.get(name) for name in ("custom_id", "request_id", "id"))
    name = next((str(name) for name in names if name is not None), f"of line {number}")
    if "replay_digest" in fields:
        return ReadAnswer(name, fields)
    if "response" not in fields:
        return ReadAnswer(name, fields.get("tpdet"))
    if fields.get("error") is not None or fields["response"] is None:
        return ReadAnswer(name, None, "its request failed")
    body = fields["response"].get("body") or {}
    asked = (fields.get("request") or {}).get("body") or {}
    if _has_prompts(asked.get("prompt")):
        why = "it answers several prompts in one call, so its digest is of a batch: ask one by one"
        return ReadAnswer(name, None, why)
    drawn = bool(asked) and asked.get("seed") is None and asked.get("temperature") != 0
    return ReadAnswer(name, body.get("tpdet"), drawn=drawn)


def _has_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _read_inspect(path: str, log: Json, results: EvaluationResults, wrong: list[str]) -> None:
    """The model's calls of a log of inspect-ai, which keeps answers over HTTP as they came."""
    if log.get("status") != "success":
        raise CheckpointError(f"{path} has status {log.get('status')!r}: let it end in success")
    run = log["eval"]
    results.versions[run["task"]] = str(run.get("task_version", 0))
    for sample in log.get("samples") or ():
        events = [event for event in sample.get("events") or () if event.get("event") == "model"]
        name = f"{run['task']}/{sample['id']}/{sample['epoch']}"
        if not events:
            wrong.append(f"{path}: answer {name} has no digest (no model was called)")
        why = "no field tpdet in the model's answer"
        answers = (
            ReadAnswer(
                f"{name}/{i}", ((event.get("call") or {}).get("response") or {}).get("tpdet"), why
            )
            for i, event in enumerate(events)
        )
        _take(path, answers, results, wrong)


def _promptfoo_answer(row: Json) -> ReadAnswer:
    """A row of promptfoo, whose provider put the answer's `tpdet` into its metadata."""
    provider = (row.get("provider") or {}).get("id", "")
    name = f"test {row.get('testIdx')}, prompt {row.get('promptIdx')}, {provider}"
    metadata = (row.get("response") or {}).get("metadata") or {}
    return ReadAnswer(
        name, metadata.get("tpdet"), "no metadata.tpdet: see the recipe in docs/golden.md"
    )
