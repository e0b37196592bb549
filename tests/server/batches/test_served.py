"""A server that is killed in the middle of a batch, and the next one, which ends it."""

import json

import openai
import pytest

from tests.lib.server.harness import MODEL, Server, eventually
from tests.server.batches.place import COMPLETIONS, lines_of, text_of
from tpdet.cli import main
from tpdet.server.batches.store import BatchStore

pytest.importorskip("python_multipart", reason="pip install 'tpdet[batches]'")
pytestmark = pytest.mark.long


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


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
