"""`tpdet check`: recorded answers are equal, or the first bit that differs is named."""

import json
import random

import pytest

from tests.lib.server.served import Served

SMALL = ("--device", "cpu", "--kv-pages", "32")


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("qwen3", kv_heads=2))


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def differences(output):
    """The lines of --json: the differences, and what was checked."""
    *found, checked = map(json.loads, output.splitlines())
    assert checked["object"] == "check" and checked["different"] == len(found)
    return found, checked


def plant(choice, token=None, bits=None):
    """Change a token id or a bit of log-probability; what stood there."""
    was = choice["token_ids"][token or 0], choice["logprob_bits"][bits or 0]
    if token is not None:
        choice["token_ids"][token] ^= 1
    if bits is not None:
        choice["logprob_bits"][bits] = f"{int(was[1], 16) ^ 1:08x}"
    return was


def test_answers_of_generate_are_checked(tpdet, model, tmp_path):
    asked = ("--prompt", "The for", "--prompt", "A", "--max-tokens", 9, "-n", 2, "--seed", 4)
    code, output, _ = tpdet("generate", model, *asked, "--json", *SMALL)
    assert code == 0
    lines = [json.loads(line) for line in output.splitlines()]
    code, output, _ = tpdet("check", model, write(tmp_path / "a", lines), *SMALL)
    assert code == 0 and output.startswith("answers       2, all equal\n")
    (token, _), (_, bits) = (
        plant(lines[0]["outputs"][1], token=5),
        plant(lines[1]["outputs"][0], bits=3),
    )
    code, output, _ = tpdet("check", model, write(tmp_path / "a", lines), "--json", *SMALL)
    (first, second), checked = differences(output)
    assert code == 1 and checked["tokens"] == 36
    place = first["difference"]
    assert (first["line"], place["choice"], place["position"]) == (1, 1, 5)
    assert (place["recorded"]["id"], place["computed"]["id"]) == (token ^ 1, token)
    place = second["difference"]
    assert (second["line"], place["choice"], place["position"]) == (2, 0, 3)
    assert int(place["recorded"]["bits"], 16) ^ 1 == int(bits, 16)
    assert place["computed"]["bits"] == bits


@pytest.mark.slow
def test_a_record_is_checked_in_its_mode_of_log_probabilities(tpdet, model, tmp_path):
    asked = ("--prompt", "The for", "--max-tokens", 4, "--temperature", 0.7, "--seed", 4, "--json")
    mode = ("--logprobs-mode", "processed_logprobs")
    lines = []
    for flags in (mode, ()):
        code, output, _ = tpdet("generate", model, *asked, *flags, *SMALL)
        assert code == 0
        lines.append(json.loads(output))
    processed, raw = lines
    (ours,), (theirs,) = processed["outputs"], raw["outputs"]
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["logprob_bits"] != theirs["logprob_bits"]
    assert processed["replay_digest"] != raw["replay_digest"]
    assert (processed["logprobs_mode"], raw["logprobs_mode"]) == (mode[1], "raw_logprobs")
    file = write(tmp_path / "a", [processed])
    code, output, said = tpdet("check", model, file, *SMALL)
    assert code == 0 and "all equal" in output, said
    code, _, said = tpdet("check", model, file, "--logprobs-mode", "raw_logprobs", *SMALL)
    assert code != 0 and "line 1 has processed_logprobs" in said
    # Bits of the other mode under its name are a difference.
    false = processed | {"outputs": raw["outputs"]}
    code, output, _ = tpdet("check", model, write(tmp_path / "a", [false]), *SMALL)
    assert code == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1 is not valid JSON"),
        ("{}", "missing required field `contract`"),
        ('{"response": {"status_code": 503, "body": null}}', "line 1 is no recorded answer"),
        ('{"response": {}, "error": {"code": "x"}}', "its request failed: leave the line out"),
        ("", "has no answers"),
    ],
)
def test_a_file_that_is_no_record_is_refused_before_a_model_is_loaded(tpdet, tmp_path, line, why):
    file = tmp_path / "answers"
    file.write_text(line)
    code, _, said = tpdet("check", "no-such-model", file)
    assert code == 65 and why in said
    assert tpdet("check", "no-such-model", tmp_path / "other")[0] == 66


def answer_over_http():
    """What a server answers, as `run-batch --record` keeps it."""
    choice = {"token_ids": [7], "logprob_bits": ["bf800000"], "prompt_token_ids": [5]}
    return {"tpdet": {"contract": "c", "weights": "w", "seed": 3}, "choices": [choice]}


def test_a_model_and_a_server_are_not_both_asked(tpdet, model, tmp_path):
    line = {"request": {"url": "/v1/completions", "body": {"return_token_ids": True}},
            "response": {"status_code": 200, "body": answer_over_http()}}  # fmt: skip
    code, _, said = tpdet("check", model, write(tmp_path / "a", [line]), "--url", "http://h:1")
    assert code == 2 and "leave one out" in said


@pytest.mark.slow
def test_answers_of_a_server_under_load_are_checked_at_another_size(tpdet, model, tmp_path):
    """Made at 2 ranks by completions and chats of all kinds; checked by 1 rank and by a server."""
    kinds = (
        {"temperature": 0},
        {"temperature": 1, "top_p": 0.8, "n": 2, "logprobs": 2},
        {"temperature": 0.9, "presence_penalty": 1, "stop": ["e"]},
        {"prompt": ["one", "two"], "temperature": 0.7, "echo": True},
    )
    rng = random.Random(1)
    asked = []
    for index in range(60):
        body = {"prompt": [rng.randrange(1000) for _ in range(1 + index)], "max_tokens": 24}
        asked.append({"url": "/v1/completions", "body": body | kinds[index % 4]})
    talk = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "n": 3}
    asked += [{"url": "/v1/chat/completions", "body": talk | {"seed": i}} for i in range(4)]
    lines = [{"custom_id": str(i), **line} for i, line in enumerate(asked)]
    file, answers = write(tmp_path / "in", lines), tmp_path / "answers"
    served = Served(model, tmp_path, 2)
    url = served.url.removesuffix("/v1")
    assert tpdet("run-batch", "-i", file, "-o", answers, "--record", "--url", url)[0] == 0
    offline = ("--prompt", "The for", "--max-tokens", 9, "-n", 2, "--top-p", 0.9, "--json")
    with answers.open("a") as more:
        more.write(tpdet("generate", model, *offline, *SMALL)[1])
    found = tpdet("check", answers, "--url", url, "--json")
    assert found[0] == 0 and differences(found[1])[1]["answers"] == 65
    assert served.end() == 0
    code, output, said = tpdet("check", model, answers, "--json", *SMALL)
    assert code == 0, (output, said)
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    token, _ = plant(lines[3]["response"]["body"]["choices"][1], token=6)
    code, output, _ = tpdet("check", model, write(answers, lines), "--json", *SMALL)
    ((found,), _) = differences(output)
    assert code == 1 and found["line"] == 4
    place = found["difference"]
    assert (place["choice"], place["position"]) == (1, 6)
    assert (place["recorded"]["id"], place["computed"]["id"]) == (token ^ 1, token)
