"""`tpdet golden record|check`, and the fixture, by a server and by a model."""

import json

import pytest

from tests.lib.server.harness import Server
from tests.tools.recorded_lines import CHATS, COMPLETIONS
from tpdet.tools.golden.fixture import Golden, GoldenError, IncomparableGoldenError
from tpdet.tools.golden.golden_file import read_goldens
from tpdet.tools.golden.pytest_plugin import GoldenUse

TALK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
ASKED = {
    "greedy": (COMPLETIONS, {"prompt": "ab", "max_tokens": 4, "temperature": 0}),
    "sampled": (COMPLETIONS, {"prompt": [97, 98], "max_tokens": 5, "n": 2}),
    "chat": (CHATS, TALK | {"seed": 3}),
}
SMALL = ("--device", "cpu", "--kv-pages", "32")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("s"))
    yield server
    assert server.stop() == 0


@pytest.fixture
def requests(tmp_path):
    lines = [{"custom_id": n, "url": url, "body": body} for n, (url, body) in ASKED.items()]
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def change(file, name, field, value):
    """Change a field of the first choice, or of what computed the answer."""
    content = json.loads(file.read_text())
    body = content["goldens"][name]["response"]["body"]
    holder = body["tpdet"] if field in body["tpdet"] else body["choices"][0]
    holder[field] = value
    file.write_text(json.dumps(content))


def test_a_server_is_held_to_a_golden_file(server, requests, tmp_path, tpdet):
    file = tmp_path / "golden.json"
    by = ("--url", server.url)
    code, _, said = tpdet("golden", "check", file, *by)
    assert code == 66 and "write some with tpdet golden record" in said
    assert tpdet("golden", "record", file, "-i", requests, *by)[0] == 0
    written = file.read_bytes()
    assert [*read_goldens(file)] == sorted(ASKED)
    code, output, _ = tpdet("golden", "check", file, *by)
    assert code == 0 and "3 golden answers, 17 tokens: 3 equal, 0 differ, 0 cannot" in output
    assert tpdet("golden", "record", file, "-i", requests, *by)[0] == 0
    assert file.read_bytes() == written
    change(file, "greedy", "token_ids", [1, 2, 3, 4])
    code, output, _ = tpdet("golden", "check", file, *by)
    assert code == 1 and "2 equal, 1 differ" in output
    assert output.startswith("golden 'greedy' of golden.json is not what the model answers now")
    assert "place     token 1 of 4 (position 0), the first of the answer" in output
    assert "recorded  '\\x01' (token 1), log-probability " in output
    assert "the 5 likeliest tokens at this place, as computed now:" in output
    change(file, "sampled", "weights", "0" * 64)
    code, output, said = tpdet("golden", "check", file, *by)
    assert code == 78 and "1 equal, 1 differ, 1 cannot be compared" in output
    assert "golden 'sampled' of golden.json cannot be compared: " in output
    assert "record them anew" in said


def test_the_fixture_asks_a_server(server, tmp_path):
    module, update, check = tmp_path / "test_it.py", GoldenUse(True), GoldenUse(False)
    answer = Golden(update, module, "test")(server.url, "ab", max_tokens=3, temperature=0)
    assert answer == Golden(check, module, "test")(server.url, "ab", max_tokens=3, temperature=0)
    with pytest.raises(GoldenError, match="max_tokens: recorded 3, asked for now 4"):
        Golden(GoldenUse(False), module, "test")(server.url, "ab", max_tokens=4, temperature=0)
    file = tmp_path / "__golden__" / "test_it.json"
    change(file, "test", "contract", "0" * 64)
    with pytest.raises(IncomparableGoldenError, match="cannot be compared"):
        Golden(GoldenUse(False), module, "test")(server.url, "ab", max_tokens=3, temperature=0)


@pytest.mark.slow
def test_a_model_is_held_to_a_golden_file(requests, tmp_path, tpdet, tiny_model):
    file, model = tmp_path / "golden.json", str(tiny_model("qwen3", kv_heads=2))
    by = ("--model", model, *SMALL)
    assert tpdet("golden", "record", file, "-i", requests, *by)[0] == 0
    assert model not in file.read_text()
    code, output, _ = tpdet("golden", "check", file, *by)
    assert code == 0 and "3 equal, 0 differ, 0 cannot be compared" in output
    code, _, said = tpdet("golden", "check", file, "--url", "http://h:1", *by)
    assert code == 2 and "leave one out" in said


def test_two_requests_of_one_name_are_refused(requests, tmp_path, tpdet):
    requests.write_text(requests.read_text() * 2)
    code, _, said = tpdet("golden", "record", tmp_path / "g", "-i", requests, "--url", "h:1")
    assert code == 2 and "line 4: line 1 has the same custom_id" in said
