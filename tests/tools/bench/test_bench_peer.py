"""`tpdet bench peer`: the table of two servers, and peers that it refuses by name."""

import asyncio
import json
import threading

import pytest

from scripts.tables.peer_table import main_rows, peer_table
from tpdet.cli import main
from tpdet.tools.bench.peer import FIGURES
from tpdet.tools.bench.plot_data import peer_rows
from tpdet.tools.measurement.results_file import append_record

GENERATE = 4


class MadeUpServer:
    """OpenAI's API as far as the load needs it, in a thread; its failings are attributes."""

    def __init__(self, name="m", key=None, owner="made-up"):
        self.name, self.key, self.owner = name, key, owner
        self.honours_ignore_eos = self.tells_usage = self.reads_ids = True
        self.pause = 0.0
        self.drafts = None  # tokens of each answer that came from drafts; None: no such metrics
        self.refuses = None
        self.bodies, self.keys_sent = [], set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self):
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        async with server:
            await self._over.wait()

    def stop(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        sent = fields.get("Authorization")
        self.keys_sent.add(sent)
        body = json.loads(await reader.readexactly(int(fields.get("Content-Length", 0))) or "{}")
        if self.key is not None and sent != f"Bearer {self.key}":
            self._write(writer, {"error": {"message": "no"}}, "401 Unauthorized")
        elif path == "/v1/models":
            self._write(writer, {"data": [{"id": self.name, "owned_by": self.owner}]})
        elif path == "/version":
            self._write(writer, {"version": "9"})
        elif path == "/metrics":
            self._write_metrics(writer)
        elif self.refuses is not None:
            self._write(writer, {"error": {"message": self.refuses}}, "400 Bad Request")
        else:
            await self._stream(writer, body)
        await writer.drain()
        writer.close()

    def _write(self, writer, content, status="200 OK"):
        data = json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status.encode(), len(data)))
        writer.write(data)

    def _write_metrics(self, writer):
        lines = ["# HELP x y", "x 1"]
        if self.drafts is not None:
            lines.append("vllm:num_requests_running 0.0")
        if self.drafts and self.bodies:
            name = "vllm:spec_decode_num_accepted_tokens_total"
            half = self.drafts * len(self.bodies) / 2
            lines += [f'{name}{{drafter="a"}} {half}', f'{name}{{drafter="b"}} {half}']
        data = "\n".join([*lines, ""]).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)

    async def _stream(self, writer, body):
        self.bodies.append(body)
        tokens = body["max_tokens"] - (not self.honours_ignore_eos)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        usage = {"prompt_tokens": len(body["prompt"]) + (not self.reads_ids),
                 "completion_tokens": tokens}  # fmt: skip
        events = [{"choices": [{"text": "x"}]}] * tokens
        events += [{"choices": [], "usage": usage}] if self.tells_usage else []
        for event in [*map(json.dumps, events), "[DONE]"]:
            data = f"data: {event}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
            await asyncio.sleep(self.pause)
        writer.write(b"0\r\n\r\n")


@pytest.fixture
def servers():
    found = [MadeUpServer(), MadeUpServer()]
    yield found
    for server in found:
        server.stop()


def bench(ours, peer, *more):
    arguments = ["--generate", str(GENERATE), "--input", "6", "--concurrency", "1,3", "--requests",
                 "5", "--turns", "2", "--tp", "1", *more]  # fmt: skip
    return main(["bench", "peer", "--url", ours, "--peer-url", peer, *arguments])


def test_both_get_the_same_requests_in_turn_and_stand_in_one_table(servers, tmp_path, capsys):
    ours, peer = servers
    ours.pause, peer.pause = 0.002, 0.02
    assert bench(ours.url, peer.url, "--output", str(tmp_path / "peer.json")) == 0
    out = capsys.readouterr().out
    record = json.loads(out.splitlines()[-1])
    (run,) = json.loads((tmp_path / "peer.json").read_text())
    assert run == record and record["bench"] == "peer"
    cases = [(row["case"], row["batch"]) for row in record["rows"]]
    assert cases == [(figure.case, readers) for readers in (1, 3) for figure in FIGURES]
    for row in record["rows"]:
        assert (row["peer"], row["model"], row["tp"], row["context"]) == ("made-up 9", "m", 1, 6)
        higher = row["unit"] == "tokens/s"
        expected = row["peer_value"] / row["value"] if higher else row["value"] / row["peer_value"]
        assert row["ratio"] == pytest.approx(expected)
        if row["case"] != "HTTP first token, mean":
            assert row["ratio"] < 1, "the peer pauses before each token"
    assert "made-up 9" in out and all(figure.case in out for figure in FIGURES)
    prompts = [sorted(str(body["prompt"]) for body in each.bodies) for each in servers]
    assert prompts[0] == prompts[1], "each server was asked something else"
    assert len(prompts[0]) == 1 + 2 * 3 * 5 == len(set(prompts[0])), "a prompt came twice"
    for body in peer.bodies:
        assert body["ignore_eos"] and body["stream"]
        assert body["stream_options"] == {"include_usage": True}
    assert {body["max_tokens"] for body in peer.bodies} == {GENERATE}


def test_tokens_that_came_from_drafts_are_told_of_each_server(servers, capsys):
    ours, peer = servers
    ours.drafts, peer.drafts = 2, 0
    assert bench(ours.url, peer.url) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out.splitlines()[-1])["rows"]
    told = [row["metrics"] for row in rows if row.get("metrics")]
    found = [(each["ours"], each["peer"]) for each in told]
    assert [each["accepted_draft_tokens"] for pair in found for each in pair] == [20, 0] * 2
    said = [line for line in err.splitlines() if "came from drafts" in line]
    assert [line.split(",")[0] for line in said] == ["tpdet: 20 of 40 tokens came from drafts"] * 2
    peer.drafts = None
    assert bench(ours.url, peer.url) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert rows[0]["metrics"]["peer"]["accepted_draft_tokens"] is None


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ({"honours_ignore_eos": False}, f"gave 3 tokens of {GENERATE}: it lacks ignore_eos"),
        ({"tells_usage": False}, "gives no usage: it needs stream_options.include_usage"),
        ({"reads_ids": False}, "read 7 tokens of a prompt of 6 ids"),
        ({"refuses": "unknown field ignore_eos"}, "status 400: unknown field ignore_eos"),
        ({"name": "other"}, "--model and --peer-model"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_server_that_cannot_be_compared_is_refused_before_any_load(
    servers, failing, message, place, capsys
):
    for name, value in failing.items():
        setattr(servers[place], name, value)
    assert bench(servers[0].url, servers[1].url) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    if "name" not in failing:
        assert ("tpdet at " in error) == (place == 0)
    assert all(len(server.bodies) <= 1 for server in servers), "it was loaded all the same"


def test_two_names_of_one_model_may_be_given(servers, capsys):
    ours, peer = servers
    peer.name = "other"
    assert bench(ours.url, peer.url, "--model", "m", "--peer-model", "nobody") == 2
    assert "--peer-model 'nobody' is not served there: use other" in capsys.readouterr().err
    names = ["--model", "m", "--peer-model", "other", "--peer-name", "vLLM 9"]
    assert bench(ours.url, peer.url, "--concurrency", "1", *names) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {(row["model"], row["peer"]) for row in record["rows"]} == {("m", "vLLM 9")}


def test_a_peer_that_is_not_there_or_wants_a_key_is_named_with_its_flag(
    servers, tmp_path, capsys, monkeypatch
):
    ours, peer = servers
    assert bench(ours.url, "http://127.0.0.1:1") == 2
    assert "no server answers at 127.0.0.1:1" in (error := capsys.readouterr().err)
    assert "--peer-url" in error and "--base-url" not in error
    assert bench("http://127.0.0.1:1", peer.url) == 2
    assert "another with --url" in capsys.readouterr().err
    peer.key = "sk-peer"
    monkeypatch.setenv("TPDET_API_KEY", "sk-ours")
    assert bench(ours.url, peer.url) == 77
    error = capsys.readouterr().err
    assert "wants an API key (401)" in error and "--peer-api-key-file" in error
    assert "TPDET_API_KEY" not in error
    keys = tmp_path / "keys"
    keys.write_text("sk-peer\n")
    keys.chmod(0o600)
    assert bench(ours.url, peer.url, "--peer-api-key-file", str(keys)) == 0
    assert peer.keys_sent == {None, "Bearer sk-peer"}, "our key was sent to another server"
    assert ours.keys_sent == {None, "Bearer sk-ours"} or ours.keys_sent == {"Bearer sk-ours"}


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--turns", "0"), ("--requests", "0"), ("--generate", "0"), ("--concurrency", "x")],
)
def test_numbers_out_of_range(flag, value, capsys):
    assert bench("http://127.0.0.1:1", "http://127.0.0.1:1", flag, value) == 2
    assert "no server answers" not in capsys.readouterr().err


def peer_run(path, *rows):
    plain = [
        {"model": "m", "tp": 1, "unit": "ms", "value": 2.0, "peer_value": 4.0, "ratio": 0.5} | row
        for row in rows
    ]
    append_record(path, "peer", {"gpu": "NVIDIA H200", "rows": plain})


def test_tables_have_the_newest_figures_beside_the_engine_that_was_compared_last(tmp_path):
    path = tmp_path / "peer.json"
    case = "HTTP between tokens, P99"
    peer_run(
        path,
        {"case": case, "batch": 64, "peer": "vLLM 8"},
        {"case": case, "batch": 64, "peer": "vLLM 9", "dtype": "bfloat16"},
    )
    peer_run(
        path,
        {"case": case, "batch": 64, "peer": "vLLM 9", "value": 8.0, "ratio": 2.0},
        {"case": case, "batch": 256, "peer": "vLLM 9"},
        {"case": "HTTP a later token, mean", "batch": 64, "peer": "vLLM 9"},
        {"case": "HTTP output", "batch": 64, "peer": "vLLM 9", "unit": "tokens/s"},
    )
    rows = peer_rows(path, "m")
    assert [(row["case"], row["batch"], row["value"]) for row in rows] == [
        (case, 64, 8.0),
        (case, 256, 2.0),
        ("HTTP a later token, mean", 64, 2.0),
        ("HTTP output", 64, 2.0),
    ]
    lines = peer_table(main_rows(rows))
    assert lines[0] == "| load | TP 1 | vLLM 9 |" and len(lines) == 4
    assert lines[2].startswith("| HTTP between tokens, P99, readers 256 [ms] | **2.00** | 4.00")
    assert len(peer_table(rows)) == 6
    assert peer_rows(path, "another") == []
