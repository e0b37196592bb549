"""`tpdet chat`, `complete` and `run-batch` against a running server, and without one."""

import contextlib
import http.server
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.lib.server.harness import TEMPLATE, Server
from tests.lib.tree import ROOT
from tpdet.cli import main
from tpdet.client import connection, terminal
from tpdet.client.address import Address
from tpdet.client.batch import answers_by_server
from tpdet.client.connection import BusyError, Connection, client_key
from tpdet.errors import NotFoundError, NotPermittedError, PeerLostError, UsageError
from tpdet.requests.body.batch_lines import BatchRequest
from tpdet.requests.routes import CHATS

KEY = "sk-client"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    template = folder / "dated.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') }}" + TEMPLATE)
    dated = ("--chat-template", str(template), "--chat-template-date", "2026-01-03")
    found = Server(folder, "--api-key-file", str(keys), *dated)
    found.keys = keys
    yield found
    found.stop()


@pytest.fixture
def keyed(server, monkeypatch):
    """The server, its address and key in the environment, and an empty standard input."""
    monkeypatch.setenv("TPDET_URL", server.url)
    monkeypatch.setenv("TPDET_API_KEY", KEY)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return server


def expected(server, route, **fields):
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": "demo", "seed": 3, **fields}
    choice = server.http.post(route, json=body, headers=headers).json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_one_message_is_answered_as_over_http(keyed, capsys):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    wanted = expected(keyed, "/v1/chat/completions", messages=messages, max_tokens=6)
    flags = ["--seed", "3", "--max-tokens", "6", "--system", "s"]
    assert main(["chat", "hello", *flags]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == wanted.rstrip("\n") and "raise --max-tokens" in err
    assert main(["chat", "-q", "hello", *flags]) == 0
    assert capsys.readouterr().out == out


def test_reasoning_is_shown_beside_the_answer(capsys):
    """A server that splits it off sends both; what was asked for is on standard output."""
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning": "why", "reasoning_content": "why"},
    ]
    deltas += [{"reasoning_content": "?"}, {"content": "yes"}, {"content": " sir"}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    assert terminal.show(events).text == "yes sir"
    assert capsys.readouterr() == ("yes sir\n", "why?\n")
    assert terminal.show(events[:3]).text == ""
    assert capsys.readouterr().err == "why?\n"


def test_a_piped_text_is_continued(keyed, capsys, monkeypatch):
    wanted = expected(keyed, "/v1/completions", prompt="ab cd", max_tokens=5)
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab cd\n"))
    assert main(["complete", "--seed", "3", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == wanted.rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "word"),
    [
        (["chat", "x"], {"TPDET_API_KEY": ""}, 77, "wants an API key (401): give a file"),
        (["chat", "x"], {"TPDET_API_KEY": "sk-no"}, 77, "does not take this API key (401)"),
        (["chat", "x", "--model", "other"], {}, 2, "refuses the request (404): "),
        (["complete", "x", "--temperature", "9"], {}, 2, "(400): temperature"),
        (["chat", "x", "--url", "http://127.0.0.1:1"], {}, 66, "Connection refused): start one"),
        (["chat", "x", "--url", "http://no-such-host.invalid"], {}, 66, "no such host"),
        (["chat", "x", "--url", "ftp://h"], {}, 2, "--url 'ftp://h': use http://HOST:PORT"),
        (["chat", "x", "--url", ""], {}, 2, "--url: '' names nothing: give a value, or leave"),
        (["chat", "x", "--model", " "], {}, 2, "--model/--model-name: ' ' names nothing"),
        (["chat"], {}, 2, "standard input is empty"),
        (["chat", "x", "-q", "y"], {}, 2, "two prompts"),
        (["chat", "x", "--max-tokns", "3"], {}, 2, "did you mean --max-tokens?"),
        (["complete", "x", "--api-key-file", "/nowhere"], {}, 66, "/nowhere does not exist"),
    ],
)
def test_what_goes_wrong_is_one_honest_line(
    keyed, monkeypatch, capsys, arguments, environ, code, word
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert word in err and err.count("\n") == 1 and err.startswith("tpdet: ") and not out
    assert "sk-no" not in err


def test_a_model_is_no_message(keyed, capsys):
    model = str(keyed.run.parent / "model")
    assert main(["complete", model]) == 2
    assert "is a model: start a server with tpdet serve" in capsys.readouterr().err
    assert main(["chat", "hello", "you"]) == 2
    assert "'hello' is no model" in capsys.readouterr().err


def test_a_model_may_be_talked_to_without_a_server(tiny_model, monkeypatch, capsys):
    for name, value in {"DEVICE": "cpu", "KV_PAGES": "8", "MAX_MODEL_LEN": "256"}.items():
        monkeypatch.setenv(f"TPDET_{name}", value)
    model = str(tiny_model(vocab=1500))
    shown = []
    for _ in range(2):
        assert main(["chat", model, "why?", "--max-tokens", "5", "--temperature", "0"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != "\n"
    assert main(["chat", model, "why?", "--top-p", "7"]) == 2
    assert "--top-p 7" in capsys.readouterr().err


def test_the_key_is_the_files_first_or_the_environments(server, tmp_path):
    assert client_key(server.keys, {"TPDET_API_KEY": "other"}) == KEY
    assert client_key(None, {"VLLM_API_KEY": "b"}) == "b" and client_key(None, {}) is None
    file = tmp_path / "k"
    for text, word in (("# none\n", "holds no key"), ("sha256:ab\n", "needs the key")):
        file.write_text(text)
        file.chmod(0o600)
        with pytest.raises(UsageError, match=word):
            client_key(file, {})
    file.chmod(0o644)
    with pytest.raises(NotPermittedError, match="0644"):
        client_key(file, {})


def conversation(monkeypatch, capsys, *lines):
    """What a conversation at the keyboard asks for and shows; "^C" is Ctrl-C."""
    asked, typed = [], iter(lines)

    def line(prompt):
        text = next(typed, None)
        if text == "^C":
            raise KeyboardInterrupt
        if text is None:
            raise EOFError
        return text

    def ask(messages):
        asked.append([(m["role"], m["content"]) for m in messages])
        content = messages[-1]["content"]
        if content == "fail":
            raise NotFoundError("it is gone")
        yield {"choices": [{"delta": {"role": "assistant"}}]}
        yield {"choices": [{"delta": {"content": content.upper()}}]}
        if content == "slow":
            raise KeyboardInterrupt
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        yield {"choices": [], "usage": {}}

    monkeypatch.setattr("builtins.input", line)
    assert terminal.converse(ask, "s") == 0
    return asked, *capsys.readouterr()


def test_a_conversation_remembers_forgets_and_survives(monkeypatch, capsys):
    asked, out, err = conversation(
        monkeypatch, capsys, "one", "", "^C", "fail", "slow", "/help", "/nope", "/clear", "two"
    )
    system = ("system", "s")
    first = [system, ("user", "one")]
    then = [*first, ("assistant", "ONE")]
    assert asked == [
        first,
        [*then, ("user", "fail")],
        [*then, ("user", "slow")],
        [system, ("user", "two")],
    ]
    assert out == "ONE\nSLOW\nTWO\n\n"
    for word in ("(Ctrl-D leaves)", "tpdet: it is gone", "/clear", "no command /nope", "new conv"):
        assert word in err


def test_a_terminal_sees_no_control_character(monkeypatch):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    for out, shown in ((Screen(), "a\ufffd[31mb\n\tc"), (io.StringIO(), "a\x1b[31mb\n\tc")):
        monkeypatch.setattr(sys, "stdout", out)
        terminal.write("a\x1b[31mb\n\tc")
        assert out.getvalue() == shown


def test_at_a_real_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(server):
    keyboard, screen = pty.openpty()
    environ = os.environ | {"TPDET_API_KEY": KEY, "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tpdet", "chat", "--url", server.url, "--seed", "1"],
        cwd=ROOT,
        env=environ,
        stdin=screen,
        stdout=screen,
        stderr=screen,
        start_new_session=True,
    )
    os.close(screen)
    seen = b""

    def wait_for(text, every=lambda: None):
        """Read until `text` is there, doing `every` at first and each second."""
        nonlocal seen
        deadline = time.monotonic() + 30
        while text not in seen:
            assert time.monotonic() < deadline, seen
            every()
            while text not in seen and select.select([keyboard], [], [], 1.0)[0]:
                seen += os.read(keyboard, 1 << 16)

    try:
        wait_for(b"Ctrl-D leaves")
        wait_for(b"> ")
        seen = b""
        os.write(keyboard, b"hello\n")
        wait_for(b"hello\r\n")
        wait_for(b"> ")
        # Pressed again: one that comes just as the prompt appears ends an answer, or is lost.
        wait_for(b"(Ctrl-D leaves)", every=lambda: process.send_signal(signal.SIGINT))
        # Pressed again too: between two prompts the terminal is not read raw, and hands a Ctrl-D on
        # as a zero byte.
        for _ in range(20):
            os.write(keyboard, b"\x04")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        assert process.poll() == 0
    finally:
        process.kill()
        os.close(keyboard)


def lines_of(*requests):
    return "".join(json.dumps(request) + "\n" for request in requests)


def test_a_batch_is_answered_in_its_order(keyed, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 3}
    requests = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "ab", "max_tokens": n + 1, "seed": 3},
        }
        for n in range(5)
    ]
    requests.append(
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    )
    source.write_text(lines_of(*requests) + "\n")
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--concurrency", "3"]) == 0
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [r["custom_id"] for r in requests]
    for answer, request in zip(answers, requests, strict=True):
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        choice = answer["response"]["body"]["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        fields = {name: v for name, v in request["body"].items() if name != "seed"}
        assert text == expected(keyed, request["url"], **fields)
    assert "6 requests, 0 failed" in capsys.readouterr().err


def test_a_record_notes_the_date_that_the_chat_template_printed(keyed, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    other = chat | {"chat_template_kwargs": {"current_date": "1999-12-31"}}
    bodies = (chat, other)
    asked = [{"custom_id": f"c{n}", "url": CHATS, "body": bodies[n]} for n in range(2)]
    source.write_text(lines_of(*asked))
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--record"]) == 0
    for line, date in zip(
        target.read_text().splitlines(), ("2026-01-03", "1999-12-31"), strict=True
    ):
        answer = json.loads(line)
        assert answer["request"]["body"]["chat_template_kwargs"] == {"current_date": date}
        ids = answer["response"]["body"]["choices"][0]["prompt_token_ids"]
        assert bytes(ids[:10]).decode() == date


def test_a_refused_request_of_a_batch_is_an_error_and_the_rest_goes_on(keyed, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    good = {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
    bad = good | {"custom_id": "c", "body": {"prompt": "a", "temperature": 9}}
    other = good | {"custom_id": "d", "body": {"prompt": "a", "model": "another"}}
    source.write_text(lines_of(bad, other, good))
    assert main(["run-batch", "-i", str(source), "-o", "-"]) == 1
    first, second, third = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["response"]["status_code"] == 400 and "temperature" in first["error"]["message"]
    assert second["response"]["status_code"] == 404 and second["response"]["request_id"]
    assert second["response"]["body"]["error"]["code"] == "model_not_found"
    assert third["error"] is None


def test_a_request_whose_server_was_lost_has_no_status(keyed, tmp_path, capsys, monkeypatch):
    def post(self, path, body):
        raise PeerLostError("gone")

    monkeypatch.setattr(Connection, "post", post)
    source = tmp_path / "in.jsonl"
    source.write_text(lines_of({"custom_id": "a", "url": "/v1/completions", "body": {}}))
    assert main(["run-batch", "-i", str(source), "-o", "-"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["response"] is None and answer["error"]["message"] == "gone"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 1: it is not JSON"),
        ('{"custom_id": "a"}', "does not have the keys"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "/v1/chat/completions or"),
        ('{"custom_id": 1, "url": "/v1/completions", "body": {}}', "custom_id is text"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "no streams"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n' * 2, "line 1 has the same"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_is_asked(keyed, tmp_path, capsys, line, word):
    source = tmp_path / "in.jsonl"
    source.write_text(line)
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out")]) == 2
    assert word in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_files_of_a_batch_that_cannot_be_used_are_named(keyed, tmp_path, capsys):
    good = {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
    source, other = tmp_path / "in.jsonl", tmp_path / "latin"
    source.write_text(lines_of(good))
    other.write_bytes(b"\xff\n")
    for read, written, code, said in (
        (source, source, 2, "in.jsonl holds the requests: name another file"),
        (source, tmp_path / "no" / "out", 66, "there is no such directory: make it first"),
        (other, tmp_path / "out", 2, "latin, line 1: it is not UTF-8"),
        (tmp_path / "none", tmp_path / "out", 66, "none does not exist: give a file of requests"),
    ):
        assert main(["run-batch", "-i", str(read), "-o", str(written)]) == code
        assert said in capsys.readouterr().err.splitlines()[-1]
    assert source.read_text() == lines_of(good)


def test_a_server_beside_a_model_that_is_loaded_here_is_refused(keyed, tiny_model, capsys):
    model = str(tiny_model())
    assert main(["chat", model, "hi", "--url", keyed.url]) == 2
    assert "is loaded here: leave one out" in capsys.readouterr().err


def test_a_busy_server_is_asked_again(monkeypatch):
    calls, waits = [], []

    def post(self, path, body):
        calls.append(path)
        if len(calls) < 3:
            raise type("Soon", (BusyError,), {"seconds": 0.5})("later", 503)
        return {"id": "x"}

    monkeypatch.setattr(Connection, "post", post)
    monkeypatch.setattr(connection.time, "sleep", waits.append)
    request = BatchRequest("a", "/v1/completions", {})
    (answer,) = answers_by_server(Connection("h:1"), [request], 1)
    assert answer["error"] is None and len(calls) == 3 and waits == [0.5, 0.5]


class CutOff(http.server.BaseHTTPRequestHandler):
    """Answers with two events and is lost, refuses once, then goes on; or ends with an error."""

    def do_POST(self):
        server = self.server
        server.asked.append((self.headers["Last-Event-ID"], self.headers["Accept"]))
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.bodies.add(body)
        first = len(server.asked) == 1
        self.send_response(503 if len(server.asked) == 2 else 200)
        self.end_headers()
        for number in (1, 2) if first else (3, 4):
            self.wfile.write(b'id: c%d\ndata: {"n": %d}\n\n' % (number, number))
        last = server.error if first else b"data: [DONE]\n\n"
        self.wfile.write(last)

    def log_message(self, *arguments):
        pass


def test_an_address_with_a_path_before_v1_stays_whole():
    """Who is given `url`, as a recorded tape is, asks the same server."""
    connection = Connection("http://host:1/models/a/v1")
    assert connection.url == "http://host:1/models/a"
    assert Address.parse(connection.url).prefix == "/models/a"


@pytest.mark.parametrize("code", [None, "engine_dead", "numerical_error"])
def test_a_stream_that_is_lost_goes_on_behind_its_last_event(monkeypatch, code):
    monkeypatch.setattr("tpdet.client.connection.PAUSE_SECONDS", 0.0)
    error = b'data: {"error": {"message": "m", "code": "%b"}}\n\n' % (code or "").encode()
    with http.server.HTTPServer(("127.0.0.1", 0), CutOff) as server:
        server.asked, server.bodies, server.error = [], set(), error if code else b""
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        events = Connection(f"http://127.0.0.1:{server.server_port}").stream("/", {"seed": 1})
        try:
            if code == "numerical_error":
                with pytest.raises(PeerLostError, match="ended the answer: m"):
                    list(events)
                assert len(server.asked) == 1
                return
            assert [event["n"] for event in events] == [1, 2, 3, 4]
            assert [place for place, _ in server.asked] == ["", "c2", "c2"]
            assert {accept for _, accept in server.asked} == {"text/event-stream"}
            assert len(server.bodies) == 1
        finally:
            server.shutdown()
