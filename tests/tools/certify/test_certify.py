"""`tpdet certify`: one hash for any order, and each answer without a digest is refused by name.

The forms of other packages are trimmed from what lm-eval 0.4.13, inspect-ai 0.3.285 and promptfoo
0.121.20 wrote of answers of a tpdet server; `test_recipes.py` runs them where they are installed.
"""

import json

import pytest

ONE, TWO = "1" * 64, "2" * 64
CERTIFICATE = "3117b4a02dc5a5b4d59c5f687cfd6be8ba4a0be141615d0de3b77063fda44e6b"
SAMPLES = "samples_task_2026-11-26T16-07-51.187902.jsonl"


def receipt(digest, **fields):
    return {"seed": 5, "replay_digest": digest, "replay_version": 2} | fields


def batch_line(name, digest, **body):
    answer = {"id": "cmpl-1", "choices": [], "tpdet": receipt(digest)}
    response = {"status_code": 200, "request_id": "cmpl-1", "body": answer}
    line = {"id": "batch_req_0", "custom_id": name, "response": response, "error": None}
    return line | ({"request": {"url": "/v1/completions", "body": body}} if body else {})


def inspect_log(*digests):
    """A log of inspect-ai as JSON; None: an answer of another server."""
    samples = []
    for number, digest in enumerate(digests, 1):
        response = {"id": "chatcmpl-1", "choices": [], "tpdet": receipt(digest)}
        if digest is None:
            del response["tpdet"]
        call = {"request": {"model": "demo"}, "response": response}
        events = [{"event": "sample_init"}, {"event": "model", "call": call}]
        samples.append({"id": number, "epoch": 1, "events": events})
    run = {"task": "small", "task_version": 3, "model": "vllm/demo"}
    return {"version": 2, "status": "success", "eval": run, "plan": {}, "samples": samples}


def promptfoo_row(index, digest):
    return {
        "promptIdx": 0,
        "testIdx": index,
        "provider": {"id": "http://host:8000/v1/chat/completions", "label": ""},
        "response": {"output": "yes", "metadata": {"tpdet": receipt(digest), "http": {}}},
    }


def sample(document, responses):
    return {"doc_id": document, "resps": responses, "filter": "none", "doc_hash": "0"}


@pytest.fixture
def certify(tpdet, tmp_path):
    """A function that certifies files of these contents: exit code, what was printed, errors."""

    def run(files, *flags):
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            if isinstance(content, list):
                text = "".join(json.dumps(line) + "\n" for line in content)
            (tmp_path / name).write_text(text)
        return tpdet("certify", *(tmp_path / name for name in files), *flags)

    return run


def value(result):
    code, output, said = result
    assert code == 0, said
    return json.loads(output)["certificate"]


def test_all_forms_of_one_evaluation_have_one_certificate(certify):
    task = ("--task", "small=3", "--json")
    certificates = {
        value(certify({"a": [batch_line("a", ONE), batch_line("b", TWO)]}, *task)),
        value(certify({"a": [batch_line("b", TWO), batch_line("a", ONE)]}, *task)),
        value(certify({"a": [batch_line("a", ONE)], "b": [batch_line("b", TWO)]}, *task)),
        value(certify({"a": [receipt(TWO), receipt(ONE)]}, *task)),  # as of generate --json
        value(certify({"a": [{"id": "x", "tpdet": receipt(d)} for d in (ONE, TWO)]}, *task)),
        value(certify({"log.json": inspect_log(ONE, TWO)}, "--json")),
        value(certify({"out.jsonl": [promptfoo_row(0, ONE), promptfoo_row(1, TWO)]}, *task)),
        value(
            certify(
                {
                    "out.json": {
                        "evalId": "eval-1",
                        "results": {"results": [promptfoo_row(1, TWO), promptfoo_row(0, ONE)]},
                    }
                },
                *task,
            )
        ),
        value(
            certify(
                {
                    "results_2026.json": {"versions": {"small": 3}, "configs": {}, "results": {}},
                    SAMPLES: [sample(0, [["yes"]]), sample(1, [["no"]])],
                    "answers": [batch_line("task/0/0/0", ONE), batch_line("task/1/0/0", TWO)],
                },
                "--json",
            )
        ),
    }
    assert certificates == {CERTIFICATE}


def test_another_answer_count_or_version_has_another_certificate(certify):
    lines = [batch_line("a", ONE), batch_line("b", TWO)]
    others = (
        ({"a": lines}, ()),
        ({"a": lines}, ("--task", "small=3")),
        ({"a": lines}, ("--task", "small=4")),
        ({"a": [*lines, batch_line("c", TWO)]}, ()),
        ({"a": lines[:1]}, ()),
    )
    assert len({value(certify(files, "--json", *flags)) for files, flags in others}) == 5


def test_an_expected_certificate_is_compared(certify):
    lines = {"a": [batch_line("a", ONE)]}
    mine = value(certify(lines, "--json"))
    assert certify(lines, "--expect", mine)[0] == 0
    code, output, _ = certify(lines, "--expect", TWO)
    assert code == 1 and f"certificate   {mine}" in output and f"expected      {TWO}" in output


def test_answers_whose_seed_was_drawn_are_counted(certify):
    lines = [
        batch_line("a", ONE, prompt="x"),
        batch_line("b", TWO, prompt="x", seed=1),
        batch_line("c", TWO, prompt="x", temperature=0),
    ]
    assert "drawn seeds   1: another run draws others" in certify({"a": lines})[1]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"a": [batch_line("one", None)]}, "answer one has no digest (no field tpdet"),
        ({"a": [{"tpdet": receipt(None, aborted=True), "id": "x"}]}, "x has no digest (aborted)"),
        ({"a": [{"id": "x", "choices": []}]}, "answer x has no digest (no field tpdet"),
        (
            {"a": [{"custom_id": "x", "response": None, "error": {"code": "lost"}}]},
            "answer x has no digest (its request failed)",
        ),
        ({"a": [batch_line("x", ONE, prompt=["a", "b"])]}, "several prompts in one call"),
        ({"a": [receipt(ONE, replay_version=1)]}, "answer of line 1 has a digest of version 1"),
        ({"a": [receipt("xyz")]}, "has no digest"),
        ({"a": inspect_log(ONE, None)}, "answer small/2/1/0 has no digest (no field tpdet in"),
        ({"a": inspect_log() | {"status": "error"}}, "has status 'error': let it end in success"),
        ({"a": [promptfoo_row(0, None)]}, "answer test 0, prompt 0, http://host"),
        (
            {SAMPLES: [sample(0, [["yes"], ["no"]])], "a": [batch_line("task/0/0/0", ONE)]},
            "sample task/0/1/0 has no answer with a digest",
        ),
        (
            {SAMPLES: [sample(0, [["yes"]])], "a": [batch_line("other/0/0/0", ONE)]},
            "answer other/0/0/0 is of no sample",
        ),
        ({"samples.jsonl": [sample(0, [["yes"]])]}, "leave it as it was, samples_TASK_DATE.jsonl"),
        ({"a": "PK\3\4"}, "inspect log convert FILE --to json"),
        ({"a": "no json"}, "line 1 is no JSON"),
        ({"a": "[1]"}, "line 1 is no object"),
        ({"a": ""}, "there are no answers in"),
    ],
)
def test_what_cannot_be_certified_is_refused_by_name(certify, files, why):
    code, _, said = certify(files)
    assert code == 65 and why in said


def test_a_task_has_a_name_and_a_version(certify):
    for flags in (("small=3", "small=4"), ("sm\nall=3",)):
        tasks = [part for flag in flags for part in ("--task", flag)]
        assert certify({"a": [batch_line("a", ONE)]}, *tasks)[0] == 2
    assert certify({"log.json": inspect_log(ONE)}, "--task", "small=3")[0] == 0
    code, _, said = certify({"log.json": inspect_log(ONE)}, "--task", "small=4")
    assert code == 2 and "--task small=4: the version of small is 3 already: leave one out" in said
    code, _, said = certify({"a": [batch_line("a", ONE)]}, "--task", "small")
    assert code == 2 and "give NAME=VERSION" in said
