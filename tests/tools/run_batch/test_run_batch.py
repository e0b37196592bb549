"""`tpdet run-batch` by a model and by a server: one output, in whatever order it was computed."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.lib.server.harness import eventually
from tests.lib.server.served import Served
from tpdet import LLM
from tpdet.cli import main
from tpdet.requests.body.batch_lines import VARYING, BatchRequest, line_digest, output_digest
from tpdet.requests.routes import CHATS, COMPLETIONS, MESSAGES, RECORDED, RESPONSES
from tpdet.tools.check import by_model

TALK = [{"role": "user", "content": "hi"}]


def requests(count):
    """Sampled and greedy, several choices and prompts, of both kinds; some are refused."""
    kinds = [
        (COMPLETIONS, {"prompt": "The for", "max_tokens": 9}),
        (COMPLETIONS, {"prompt": ["ab", "cd"], "max_tokens": 5, "n": 2, "top_p": 0.9}),
        (CHATS, {"messages": TALK, "max_tokens": 7, "temperature": 0}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 4, "logprobs": 2, "seed": 5}),
        (COMPLETIONS, {"prompt": "x", "temperature": 9}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 8, "structured_outputs": {"choice": ["a"]}}),
        (RESPONSES, {"input": "hi", "max_output_tokens": 6}),
        (MESSAGES, {"messages": TALK, "max_tokens": 5}),
        (MESSAGES, {"messages": TALK}),
        (RESPONSES, {"input": "hi", "previous_response_id": "resp_1"}),
    ]
    return [
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": body}
        for n, (url, body) in ((n, kinds[n % len(kinds)]) for n in range(count))
    ]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run(capsys, *arguments):
    """The exit code and the printed digest."""
    code = main(["run-batch", *map(str, arguments)])
    error = capsys.readouterr().err
    assert code in (0, 1), error
    return code, error.split("output digest ")[1].strip()


def shuffled(lines, number):
    return sorted(lines, key=lambda line: hash((number, int(line["custom_id"][1:]))))


def test_an_output_is_one_in_any_order_and_concurrency(tiny_model, tmp_path, capsys, monkeypatch):
    model, lines = tiny_model(), requests(11)
    llm = LLM(model=str(model), max_model_len=512)  # one for all runs: loading it takes the time
    monkeypatch.setattr(by_model, "open_model", lambda options: nullcontext(llm))
    target, digests, bodies = tmp_path / "out", set(), set()
    for number in range(5):
        source = write(tmp_path / "in", shuffled(lines, number))
        concurrency = (1, 8, 64)[number % 3]
        code, digest = run(capsys, model, source, target, "--concurrency", concurrency)
        assert code == 1  # of the refused ones
        written = [json.loads(line) for line in target.read_text().splitlines()]
        asked = [json.loads(line)["custom_id"] for line in Path(source).read_text().splitlines()]
        assert [line["custom_id"] for line in written] == asked
        assert digest == output_digest(map(line_digest, written))
        digests.add(digest)
        answers = {line["custom_id"]: line["response"]["body"].get("choices") for line in written}
        bodies.add(json.dumps(answers, sort_keys=True))
    llm.close()
    assert len(digests) == len(bodies) == 1
    # Without return_token_ids a body has no more than a server's.
    assert "contract" not in written[0]["response"]["body"].get("tpdet", {})
    one, twin = answers["r0"][0]["text"], answers["r10"][0]["text"]
    assert one != twin  # equal bodies of other names draw other noise
    refused = next(line for line in written if line["custom_id"] == "r4")
    assert refused["response"]["status_code"] == 400
    assert refused["error"]["code"] == "invalid_request_error"
    bodies = {line["custom_id"]: line["response"]["body"] for line in written}
    assert (bodies["r6"]["object"], bodies["r7"]["type"]) == ("response", "message")
    assert bodies["r8"]["error"]["message"] == "max_tokens is missing" and "r8" in str(bodies["r8"])
    assert bodies["r8"]["type"] == "error" and bodies["r9"]["error"]["param"]


def test_a_digest_sees_every_part_but_those_that_vary():
    body = {"id": "a", "created": 1, "choices": [{"text": "x", "logprob_bits": "0f"}]}
    body["usage"] = {"completion_tokens_details": {"accepted_prediction_tokens": 1}}
    response = {"status_code": 200, "request_id": "r", "body": body}
    line = {"id": "i", "custom_id": "c", "response": response, "error": None, "request": {}}

    def changed(path, value):
        copy = json.loads(json.dumps(line))
        place = copy
        *way, last = path.split(".")
        for name in way:
            place = place.setdefault(name, {})
        place[last] = value
        return line_digest(copy)

    for path in VARYING:
        assert changed(path, "other") == line_digest(line), path
    for path in (
        "custom_id",
        "response.status_code",
        "response.body.choices",
        "error",
        "response.body.usage.total",
        "response.body.tpdet.id",
    ):
        assert changed(path, "other") != line_digest(line), path
    one, two = line_digest(line), changed("custom_id", "d")
    assert output_digest([one, two]) == output_digest([two, one]) != output_digest([one])


def test_a_seed_is_a_function_of_the_name_alone():
    seed = BatchRequest("a", COMPLETIONS, {"prompt": "x"}).seeded_body["seed"]
    assert seed == 8690251887831129  # in every version: outputs are compared across them
    assert BatchRequest("a", CHATS, {}).seeded_body["seed"] == seed
    assert BatchRequest("b", COMPLETIONS, {"prompt": "x"}).seeded_body["seed"] != seed
    for body in ({"seed": 0}, {"tpdet": {"seeds": [1]}}):
        assert BatchRequest("a", COMPLETIONS, body).seeded_body == body


def test_files_are_named_in_either_way_and_once(tmp_path, capsys):
    source, target = write(tmp_path / "in", []), tmp_path / "out"
    for paths in (
        [source],
        [source, "-o", target],
        ["m", source, target, "-i", source],
        ["m", "-i", source, "-o", target, "--url", "http://h:1"],
        [],
    ):
        assert main(["run-batch", *map(str, paths)]) == 2
        assert capsys.readouterr().err.startswith("tpdet: ")
    assert not target.exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_servers_and_models_of_each_size_give_one_output(tiny_model, tmp_path, capsys, monkeypatch):
    """Five shuffles x concurrency 1, 8, 64 x TP 1, 2, by a model, a server and its batches."""
    model, lines, digests = tiny_model(), requests(24), {}
    sources = [write(tmp_path / f"in{n}", shuffled(lines, n)) for n in range(5)]
    target = tmp_path / "out"
    for ranks in (1, 2):
        llm = LLM(model=str(model), max_model_len=512, tensor_parallel_size=ranks)
        with llm, monkeypatch.context() as patch:
            patch.setattr(by_model, "open_model", lambda options, llm=llm: nullcontext(llm))
            for source in sources:
                for concurrency in (1, 8, 64):
                    flags = ("--concurrency", concurrency, "--model", "tiny")
                    _, digest = run(capsys, model, source, target, *flags)
                    digests["model", ranks, source, concurrency] = digest
        folder = tmp_path / f"s{ranks}"
        folder.mkdir()
        served = Served(model, folder, ranks, "--batch-dir", str(folder / "batches"))
        try:
            for source in sources:
                for concurrency in (1, 8, 64):
                    flags = ("--concurrency", concurrency, "--url", served.ready["url"])
                    _, digest = run(capsys, source, target, *flags)
                    digests["server", ranks, source, concurrency] = digest
                for url in RECORDED:
                    digests["batch", url, ranks, source] = batched(served.client, source, url)
        finally:
            served.kill()
    assert len(digests) == 100
    whole = {digest for name, digest in digests.items() if name[0] != "batch"}
    of_batches = {(name[1], digest) for name, digest in digests.items() if name[0] == "batch"}
    assert len(whole) == 1 and len(of_batches) == 4


def batched(client, source, url):
    """The digest of a batch of those lines that go to one route."""
    lines = [json.loads(line) for line in Path(source).read_text().splitlines()]
    data = "".join(json.dumps(line) + "\n" for line in lines if line["url"] == url)
    file = client.files.create(file=("in", data.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed", 600)
    return client.batches.retrieve(batch.id).tpdet["output_digest"]
