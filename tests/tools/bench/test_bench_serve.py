"""`tpdet bench serve`: its figures, its reading of a stream, and a run against a real server."""

import asyncio
import json
import sys

import numpy as np
import pytest

from tests.lib.server.harness import Server
from tpdet.cli import main
from tpdet.client.address import Address
from tpdet.errors import UsageError
from tpdet.tools.bench.client import Answer, get_json, stream
from tpdet.tools.bench.http_load import metrics, percentile

VLLM_KEYS = {
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(
        f"{part}_{name}_ms"
        for name in ("ttft", "tpot", "itl")
        for part in ("mean", "median", "p99")
    ),
}


def answer(sent, *pieces, tokens=None, **fields):
    tokens = len(pieces) if tokens is None else tokens
    return Answer(sent=sent, pieces=list(pieces), input_tokens=10, output_tokens=tokens, **fields)


def test_figures_of_known_times():
    answers = [
        answer(0.0, 1.0, 1.5, 3.0),
        answer(1.0, 1.25),
        answer(0.0, 9.0, error="lost"),
    ]
    found = metrics(answers, 4.0)
    assert found.keys() >= VLLM_KEYS
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["lost"])
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 4)
    assert (found["request_throughput"], found["output_throughput"]) == (0.5, 1.0)
    assert found["total_token_throughput"] == 6.0
    assert found["mean_ttft_ms"] == 625.0 and found["mean_tpot_ms"] == 1000.0
    assert found["median_itl_ms"] == 1000.0 and found["p99_itl_ms"] == pytest.approx(1490.0)


def test_several_tokens_in_one_event_count_once_each():
    assert metrics([answer(0.0, 1.0, 3.0, tokens=5)], 3.0)["mean_tpot_ms"] == 500.0


def test_nothing_gives_zeros():
    found = metrics([Answer(error="x")], 1.0)
    assert found["completed"] == 0 and found["mean_ttft_ms"] == found["p99_itl_ms"] == 0.0


def test_percentiles_are_numpys():
    values = [3.0, 1.0, 10.0, 4.0, 4.0]
    for percent in (0, 50, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://h:80", ("h", 80, False, "")),
        ("http://h:8000/v1/", ("h", 8000, False, "")),
        ("https://h/a/v1", ("h", 443, True, "/a")),
        ("http://[::1]:9", ("::1", 9, False, "")),
    ],
)
def test_addresses(url, found):
    address = Address.parse(url)
    assert (address.host, address.port, address.secure, address.prefix) == found


@pytest.mark.parametrize("url", ["h:80", "ftp://h", "http://", "http://h:x"])
def test_what_is_no_address(url):
    with pytest.raises(UsageError, match="--base-url"):
        Address.parse(url)


def event(content):
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode())


PIECE = event({"choices": [{"text": "a"}], "usage": None})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
DONE = event(b"[DONE]")
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def ask(pieces, status=HEAD, close=b"0\r\n\r\n"):
    """What `stream` makes of a server that writes these pieces one by one."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(status)
        for piece in pieces:
            writer.write(chunk(piece))
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write(close)
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await stream(Address("127.0.0.1", port, False, ""), "/v1/completions", {}, {})

    return asyncio.run(run())


def test_events_may_be_cut_anywhere():
    whole = b"\n\n".join([PIECE, PIECE, USAGE, DONE, b""])
    found = ask([whole[i : i + 17] for i in range(0, len(whole), 17)])
    assert found.error is None and len(found.pieces) == 2
    assert (found.input_tokens, found.output_tokens) == (3, 2)
    assert found.sent < found.pieces[0] < found.pieces[1] <= found.ended


@pytest.mark.parametrize(
    ("pieces", "close", "message"),
    [
        ([PIECE + b"\n\n"], b"0\r\n\r\n", "ended before"),
        ([PIECE + b"\n\n"], b"", "ended before"),
        ([event({"error": {"message": "lost a rank"}}) + b"\n\n"], b"0\r\n\r\n", "lost a rank"),
        ([event(b"{") + b"\n\n"], b"0\r\n\r\n", "DecodeError"),
    ],
)
def test_a_stream_that_goes_wrong_is_an_error(pieces, close, message):
    assert message in ask(pieces, close=close).error


def test_a_refusal_is_an_error_with_its_status():
    status = HEAD.replace(b"200 OK", b"429 Too Many Requests")
    assert "status 429" in ask([b'{"error": "later"}'], status=status).error


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("served"))
    yield found
    found.stop()


def test_a_server_is_loaded_and_the_run_appended(server, tmp_path, capsys):
    arguments = ["bench", "serve", "--base-url", server.url, "--requests", "6", "--generate", "5",
                 "--input", "3:9", "--vocabulary", "200", "--concurrency", "2", "--rate", "200",
                 "--output", str(tmp_path / "serve.json")]  # fmt: skip
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.keys() >= VLLM_KEYS
    assert (found["completed"], found["failed"], found["model_id"]) == (6, 0, "demo")
    assert found["total_output_tokens"] == 30 and 18 <= found["total_input_tokens"] <= 54
    (run,) = json.loads((tmp_path / "serve.json").read_text())
    (row,) = run["rows"]
    assert row["value"] == found["output_throughput"] and row["mode"] == "rate 200, 2 in flight"
    assert row["metrics"]["median_ttft_ms"] == found["median_ttft_ms"]
    assert found["accepted_draft_tokens"] == 0  # its metrics count them, and nobody drafts


def test_a_load_of_chats(server, capsys):
    arguments = ["bench", "serve", "--base-url", server.url, "--requests", "2", "--generate", "4",
                 "--input", "3", "--vocabulary", "200", "--chat"]  # fmt: skip
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["completed"], found["total_output_tokens"]) == (2, 8)
    assert found["total_input_tokens"] > 6  # the template's tokens, and of each id its digits


def test_requests_that_all_fail_are_a_failure(server, capsys):
    arguments = ["bench", "serve", "--base-url", server.url, "--requests", "2", "--model", "other"]
    assert main(arguments) == 70
    assert "no request was answered" in capsys.readouterr().err


def test_no_server(capsys):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1"]) == 2
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no server"):
        get_json(Address("127.0.0.1", 1, False, ""), "/v1/models", {})


@pytest.mark.parametrize(
    ("flag", "value"), [("--requests", "0"), ("--concurrency", "0"), ("--rate", "-1")]
)
def test_numbers_out_of_range(flag, value, capsys):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1", flag, value]) == 2
    assert flag in capsys.readouterr().err


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys"
    keys.write_text("sk-bench\n")
    keys.chmod(0o600)
    found = Server(folder, "--api-key-file", str(keys))
    found.keys = keys
    yield found
    found.stop()


def test_a_server_that_wants_a_key_is_told_apart_from_none(keyed, capsys, monkeypatch):
    load = ["bench", "serve", "--base-url", keyed.url, "--requests", "1", "--generate", "1",
            "--input", "3", "--vocabulary", "200"]  # fmt: skip
    assert main(load) == 77
    err = capsys.readouterr().err
    assert " wants an API key (401)" in err and "--api-key-file" in err and "TPDET_API_KEY" in err
    assert "b'" not in err and "no server" not in err and err.count("\n") == 1
    monkeypatch.setenv("TPDET_API_KEY", "sk-other")
    assert main(load) == 77
    assert "does not take this API key" in capsys.readouterr().err
    assert main([*load, "--api-key-file", str(keyed.keys)]) == 0
    monkeypatch.setenv("TPDET_API_KEY", "sk-bench")
    assert main(load) == 0


def test_figures_are_labelled_lines_and_json_only_where_it_is_asked_for(
    server, capsys, monkeypatch
):
    load = ["bench", "serve", "--base-url", server.url, "--requests", "2", "--generate", "3",
            "--input", "3", "--vocabulary", "200"]  # fmt: skip
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    assert main(load) == 0
    out = capsys.readouterr().out
    for label in (
        "Successful requests:",
        "Output token throughput (tok/s):",
        "Mean TTFT (ms):",
        "Median TPOT (ms):",
        "P99 ITL (ms):",
    ):
        assert label in out
    assert "{" not in out and "│" not in out
    assert main([*load, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["completed"] == 2
