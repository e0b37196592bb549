"""Batches of whole servers: of one that is killed and the next, and of two HTTP processes."""

import json

import openai
import pytest

from tests.lib.server.harness import MODEL, Server, eventually
from tests.server.batches.place import COMPLETIONS, lines_of, text_of
from tpdet.cli import main
from tpdet.server.batches.store import BatchStore

pytest.importorskip("python_multipart", reason="pip install 'tpdet[batches]'")
pytestmark = pytest.mark.long


def client_of(server, key="x"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def begun(client, lines):
    file = client.files.create(file=("in.jsonl", text_of(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
    ).id


def test_a_batch_outlives_its_server(tmp_path, capsys):
    flags = ("--batch-dir", str(tmp_path / "batches"))
    lines = lines_of(40, cache_salt="slow=0.02", return_token_ids=True, n=2, model=MODEL)
    lines[7]["body"]["temperature"] = 9
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir(), second.mkdir()
    server = Server(first, *flags, "--max-num-seqs", "16")
    client = client_of(server)
    name = begun(client, lines)
    eventually(lambda: client.batches.retrieve(name).request_counts.completed > 4)
    server.process.kill()
    server.process.wait()

    server = Server(second, *flags, "--max-num-seqs", "16")
    client = client_of(server)
    document = server.http.get("/openapi.json").json()
    assert {"get", "post"} == document["paths"]["/v1/files"].keys()
    eventually(lambda: client.batches.retrieve(name).status == "completed")
    batch = client.batches.retrieve(name)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (39, 1)
    (tmp_path / "in").write_bytes(text_of(lines[::-1]))
    paths = str(tmp_path / "in"), str(tmp_path / "out")
    assert main(["run-batch", *paths, "--url", server.url, "--concurrency", "5"]) == 1
    assert batch.tpdet["output_digest"] in capsys.readouterr().err  # the same bits, in any order
    ids = {
        json.loads(line)["custom_id"]: [
            choice["token_ids"] for choice in json.loads(line)["response"]["body"]["choices"]
        ]
        for line in client.files.content(batch.output_file_id).iter_lines()
    }
    assert len(ids) == 39 and ids["r1"][0] != ids["r1"][1]

    lines = lines_of(40, cache_salt="hang")  # what waits for ever does not hold a drain up
    name = begun(client, lines)
    eventually(lambda: client.batches.retrieve(name).status == "in_progress")
    assert server.stop() == 0, server.log.read_text()
    store = BatchStore(tmp_path / "batches")
    assert [one.id for one in store.open_batches()] == [name]
    store.close()


def clients_of_both(server, key):
    """A client on a connection to each of two HTTP processes."""
    found = {}
    while len(found) < 2:
        client = client_of(server, key)
        answer = client.files.with_raw_response.list()
        found.setdefault(int(answer.headers["x-request-id"][-2:], 16), client)
    return found[0], found[1]


def test_either_of_two_processes_takes_files_and_begins_shows_and_cancels_batches(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    keys.chmod(0o600)
    flags = "--batch-dir", str(tmp_path / "batches"), "--api-key-file", str(keys)
    server = Server(tmp_path, *flags, "--http-processes", "2")
    first, second = clients_of_both(server, "one")
    data = bytes(range(256)) * 10_000
    sent = [one.files.create(file=("a", data), purpose="batch") for one in (first, second)]
    for one in (first, second):
        assert [file.id for file in one.files.list(order="asc", limit=2)] == [f.id for f in sent]
        assert all(one.files.content(file.id).content == data for file in sent)
        with pytest.raises(openai.BadRequestError, match="send purpose batch"):
            one.files.create(file=("a", data), purpose="evals")
        with pytest.raises(openai.NotFoundError, match="under this key"):
            one.with_options(api_key="two").files.retrieve(sent[0].id)
        with pytest.raises(openai.AuthenticationError):
            one.with_options(api_key="three").files.list()
    query = b"?limit=\xff HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer one"
    odd = [server.raw(b"GET /v1/files%b\r\n\r\n" % query) for _ in range(8)]
    assert all(answer.startswith(b"HTTP/1.1 400") for answer in odd), odd
    name = begun(second, lines_of(20, model=MODEL))
    eventually(lambda: second.batches.retrieve(name).status == "completed")
    batch = first.batches.retrieve(name)
    assert batch == second.batches.retrieve(name) and batch.request_counts.completed == 20
    outputs = [one.files.content(batch.output_file_id).content for one in (first, second)]
    assert outputs[0] == outputs[1] and outputs[0].count(b"\n") == 20
    name = begun(first, lines_of(20, model=MODEL, cache_salt="hang"))
    assert second.batches.cancel(name).status == "cancelling"
    eventually(lambda: second.batches.retrieve(name).status == "cancelled")
    assert second.files.delete(sent[0].id).deleted
    documents = [one.get("/../openapi.json", cast_to=object) for one in (first, second)]
    assert documents[0] == documents[1] and "/v1/files" in documents[0]["paths"]
    first.close(), second.close()
    assert server.stop() == 0, server.log.read_text()
    assert not (server.run / "http.sock").exists()
    lines = [line for line in server.log.read_text().splitlines() if "POST /v1/batches " in line]
    assert len(lines) == 2, "the first process logs no request that another sent on"
