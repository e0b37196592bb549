"""Files and batches, as the openai client drives them: answered, ended, resumed, and whose."""

import asyncio
import functools
import json

import openai
import pytest

from tests.server.batches.place import (
    COMPLETIONS,
    begun,
    ended,
    lines_of,
    read,
    serving,
    text_of,
)
from tpdet.errors import NotPermittedError, ResourceError
from tpdet.requests.body import limits
from tpdet.requests.body.batch_lines import line_digest, output_digest
from tpdet.requests.body.problems import bad_request, from_code
from tpdet.server.batches import runner, store
from tpdet.server.batches.record import Batch, BatchFile
from tpdet.server.batches.store import BatchStore, StoreUnavailableError

pytest.importorskip("python_multipart", reason="pip install 'tpdet[batches]'")


def asynchronous(test):
    """Runs a test's coroutine."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(test(*arguments, **named))

    return run


@asynchronous
async def test_a_file_is_given_back_as_it_was_sent_until_it_is_deleted(tmp_path):
    async with serving(tmp_path) as server:
        client = server.openai()
        for data in (b"", b"\x00\r\n--x\r\n" * 50_000, text_of(lines_of(2))):
            file = await client.files.create(file=("../../etc/ä.jsonl", data), purpose="batch")
            assert (file.filename, file.bytes) == ("ä.jsonl", len(data))
            assert (await client.files.content(file.id)).content == data
            assert await client.files.retrieve(file.id) == file
        listed = await client.files.list(limit=2)
        assert listed.data[0] == file and listed.has_more
        every = [one.id async for one in client.files.list(limit=1, order="asc")]
        assert len(every) == 3 and every[-1] == file.id
        assert (await client.files.list(purpose="batch_output")).data == []
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file.id)
        assert len([*(tmp_path / "files").iterdir()]) == 2
        assert all(path.stat().st_mode & 0o77 == 0 for path in tmp_path.rglob("*.sqlite"))


@asynchronous
async def test_a_batch_is_answered_and_its_output_is_in_the_order_of_its_lines(
    tmp_path, monkeypatch
):
    async with serving(tmp_path) as server:
        client, answers = server.openai(), server.answers
        answers.refuse = {
            "p1": [bad_request("no", "prompt")],
            "p2": [from_code("paused", "wait")],  # it is asked again
            "p3": [from_code("numerical_error", "NaN")],
        }
        monkeypatch.setattr(runner, "RETRY_SECONDS", 0.01)
        lines = lines_of(30)
        lines[5]["body"]["seed"] = 5
        batch = await begun(client, b"\xef\xbb\xbf" + text_of(lines) + b"\n", metadata={"a": "b"})
        assert batch.status == "validating" and batch.metadata == {"a": "b"}
        batch = await ended(client, batch)
        assert (batch.status, batch.request_counts.total) == ("completed", 30)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (28, 2)
        output, errors = [
            await read(client, name) for name in (batch.output_file_id, batch.error_file_id)
        ]
        assert [line["custom_id"] for line in errors] == ["r1", "r3"]
        assert [line["response"]["status_code"] for line in errors] == [400, 500]
        assert errors[1]["error"]["code"] == "numerical_error"
        wrong = {"r1", "r3"}
        assert [line["custom_id"] for line in output] == [
            f"r{n}" for n in range(30) if f"r{n}" not in wrong
        ]
        assert all(line["response"]["body"]["owner"] for line in output)
        seeds = {line["custom_id"]: line["response"]["body"]["echo"]["seed"] for line in output}
        assert seeds["r5"] == 5 and len({*seeds.values()}) == 28
        assert batch.tpdet["output_digest"] == output_digest(map(line_digest, [*output, *errors]))
        assert answers.most == 8  # half of the seats
        file = await client.files.retrieve(batch.output_file_id)
        assert file.bytes == len((await client.files.content(file.id)).content)
        with pytest.raises(openai.BadRequestError, match="no file of purpose batch"):
            await client.batches.create(
                input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
            )
        await client.files.delete(batch.error_file_id)
        assert (await client.batches.retrieve(batch.id)).tpdet == {"output_digest": None}
        assert await read(client, batch.output_file_id) == output


@asynchronous
async def test_files_and_batches_do_not_exist_for_another_key(tmp_path):
    async with serving(tmp_path) as server:
        client, other = server.openai(0), server.openai(1)
        batch = await ended(client, await begun(client, lines_of(1)))
        files = batch.input_file_id, batch.output_file_id
        calls = [
            *(call(name) for name in files
              for call in (other.files.retrieve, other.files.content, other.files.delete)),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(openai.NotFoundError, match="under this key"):
                await call
        with pytest.raises(openai.BadRequestError, match="input_file_id"):
            await other.batches.create(
                input_file_id=files[0], endpoint=COMPLETIONS, completion_window="24h"
            )
        assert (await other.files.list()).data == (await other.batches.list()).data == []
        assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]
        assert (
            await server.http.get("/v1/files", headers={"authorization": ""})
        ).status_code == 401


@asynchronous
async def test_wrong_lines_are_named_by_number_and_nothing_is_asked(tmp_path):
    good, other = lines_of(2)
    lines = [
        json.dumps(good), "", "{", "[]", json.dumps(good), '{"custom_id": "x"}',
        json.dumps(other | {"url": "/v1/chat/completions"}), json.dumps(other | {"method": "GET"}),
        json.dumps(other | {"body": {"stream": True}}), json.dumps(other | {"custom_id": ""}),
        json.dumps(other | {"more": 1}), '{"custom_id": "y", "custom_id": "z"}', "\udcff",
    ]  # fmt: skip
    data = "\r\n".join(lines).encode("utf-8", "surrogateescape")
    async with serving(tmp_path) as server:
        client = server.openai()
        batch = await ended(client, await begun(client, data))
        assert batch.status == "failed" and server.answers.asked == []
        assert [one.line for one in batch.errors.data] == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
        assert batch.errors.data[2].message == (
            "line 5: line 1 has the same custom_id: each answer is found by its own"
        )
        empty = await ended(client, await begun(client, b"\n\n"))
        assert empty.status == "failed" and "no requests" in empty.errors.data[0].message


@asynchronous
async def test_a_cancelled_batch_has_the_answers_that_there_are(tmp_path):
    async with serving(tmp_path) as server:
        client, answers = server.openai(), server.answers
        batch = await begun(client, lines_of(20))
        while len(answers.asked) < 9:
            await asyncio.sleep(0)
        answers.open.clear()
        with pytest.raises(openai.ConflictError, match="cancel the batch"):
            await client.files.delete(batch.input_file_id)
        batch = await client.batches.cancel(batch.id)
        assert batch.status == "cancelling" and batch.cancelling_at
        batch = await ended(client, batch)
        counts = batch.request_counts
        assert batch.status == "cancelled" and counts.completed + counts.failed == 20
        errors = await read(client, batch.error_file_id)
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        assert 0 < counts.completed < 20 and answers.running == 0
        assert len(await read(client, batch.output_file_id)) == counts.completed
        with pytest.raises(openai.ConflictError, match="is cancelled"):
            await client.batches.cancel(batch.id)


@asynchronous
async def test_a_batch_ends_after_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_SECONDS", 0)
    async with serving(tmp_path) as server:
        server.answers.open.clear()
        client = server.openai()
        batch = await ended(client, await begun(client, lines_of(3)))
        errors = await read(client, batch.error_file_id)
        assert batch.status == "expired" and batch.output_file_id is None
        assert [line["error"]["code"] for line in errors] == ["batch_expired"] * 3


@asynchronous
async def test_a_batch_goes_on_after_a_restart_with_the_same_output(tmp_path):
    digests, done = [], []
    for stop in (0, 1, 12, 20):
        folder = tmp_path / str(stop)
        async with serving(folder) as server:
            client = server.openai()
            batch = await begun(client, lines_of(30))
            while stop and len(server.answers.asked) < stop + 8:
                await asyncio.sleep(0)
            server.answers.open.clear() if stop else None
            if not stop:
                await ended(client, batch)
        async with serving(folder) as server:
            client = server.openai()
            batch = await ended(client, batch)
            assert batch.status == "completed"
            digests.append(batch.tpdet["output_digest"])
            done.append(len(server.answers.asked))
            assert len(await read(client, batch.output_file_id)) == 30
    assert len({*digests}) == 1
    assert done[0] == 0 < done[-1] < 30  # what was durable is not asked again


@asynchronous
async def test_a_disk_that_fails_delays_a_batch_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "DISK_SECONDS", 0.01)
    keep, failures = BatchStore.add_answers, [3]

    def failing(self, batch_id, rows):
        if failures[0]:
            failures[0] -= 1
            raise StoreUnavailableError("No space left on device")
        keep(self, batch_id, rows)

    monkeypatch.setattr(BatchStore, "add_answers", failing)
    async with serving(tmp_path) as server:
        client = server.openai()
        batch = await ended(client, await begun(client, lines_of(20)))
        assert (batch.status, batch.request_counts.completed, failures) == ("completed", 20, [0])

        def full(self, file):
            raise StoreUnavailableError("No space left on device")

        monkeypatch.setattr(BatchStore, "put", full)
        with pytest.raises(openai.InternalServerError, match="try again later"):
            await client.files.create(file=("x", b"y"), purpose="batch")
        with open("/dev/full", "wb", buffering=0) as sink, pytest.raises(OSError):
            sink.write(b"x")  # the control of what comes next
        monkeypatch.setattr(
            store.os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "full"))
        )
        with pytest.raises(openai.InternalServerError, match="does not take the file"):
            await client.files.create(file=("x", b"y"), purpose="batch")
        monkeypatch.undo()
        kept = {*(tmp_path / "files").iterdir()}
        assert (tmp_path / "files" / batch.input_file_id) in kept


@asynchronous
@pytest.mark.parametrize("last", ["cancelled", "failed", "expired"])
async def test_a_batch_ends_as_it_ended_though_the_disk_fails_then(tmp_path, monkeypatch, last):
    monkeypatch.setattr(runner, "DISK_SECONDS", 0.01)
    keep, failures = BatchStore.save, [3]

    def failing(self, batch, outputs=()):
        if failures[0] and batch.status == last:
            failures[0] -= 1
            raise StoreUnavailableError("No space left on device")
        keep(self, batch, outputs)

    monkeypatch.setattr(BatchStore, "save", failing)
    if last == "expired":
        monkeypatch.setattr(limits, "BATCH_SECONDS", 0)
    async with serving(tmp_path) as server:
        client = server.openai()
        server.answers.open.clear()
        batch = await begun(client, b"{}" if last == "failed" else lines_of(3))
        if last == "cancelled":
            await client.batches.cancel(batch.id)
        while server.batches.open_count:
            await asyncio.sleep(0.005)
        batch = await client.batches.retrieve(batch.id)
        assert (batch.status, failures) == (last, [0])
        assert (batch.errors is None) == (last != "failed")
        assert batch.request_counts.failed == (0 if last == "failed" else 3)


def test_a_file_that_a_batch_reads_stays_and_one_that_is_gone_begins_none(tmp_path):
    kept = BatchStore(tmp_path)
    file = BatchFile(id="file-x", owner="me", created=0, filename="x", bytes=1)
    with kept.new_content(file.id) as target:
        target.write(b"y")
    kept.put(file)

    def batch(name, owner="me"):
        fields = {"endpoint": COMPLETIONS, "completion_window": "24h", "created_at": 0}
        return Batch(id=name, owner=owner, input_file_id=file.id, **fields)

    assert not kept.begin(batch("b", "you")) and kept.begin(batch("b"))
    assert not kept.remove_unused(file) and kept.file(file.id, "me") == file
    done = batch("b")
    done.enter("completed")
    kept.save(done)
    assert kept.remove_unused(file) and not kept.begin(batch("c"))
    assert [one.id for one in kept.batches("me")] == ["b"]
    kept.close()


def test_a_directory_is_one_servers(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.0)
    first = BatchStore(tmp_path / "b")
    with pytest.raises(ResourceError, match="is used by another server"):
        BatchStore(tmp_path / "b")
    first.close()
    (tmp_path / "b" / "files" / ".new-file-x").write_bytes(b"left")
    (tmp_path / "b" / "files" / "file-orphan").write_bytes(b"left")
    BatchStore(tmp_path / "b").close()
    assert not [*(tmp_path / "b" / "files").iterdir()]
    (tmp_path / "file").touch()
    with pytest.raises(NotPermittedError, match="cannot be used"):
        BatchStore(tmp_path / "file")


@asynchronous
async def test_what_is_asked_of_a_draining_server_is_asked_of_the_next_one(tmp_path):
    """Whoever asks for files and batches is told so, as for answers."""
    async with serving(tmp_path) as server:
        batch = await ended(server.openai(), await begun(server.openai(), lines_of(1)))
        await server.drain()
        form = {"files": {"file": b"x"}, "data": {"purpose": "batch"}}
        body = {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"}
        for method, path, more in (
            ("POST", "/v1/files", form),
            ("GET", "/v1/files", {}),
            ("GET", f"/v1/files/{batch.output_file_id}", {}),
            ("GET", f"/v1/files/{batch.output_file_id}/content", {}),
            ("DELETE", f"/v1/files/{batch.output_file_id}", {}),
            ("POST", "/v1/batches", {"json": body}),
            ("GET", "/v1/batches", {}),
            ("POST", f"/v1/batches/{batch.id}/cancel", {}),
        ):
            answer = await server.http.request(method, path, **more)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining"), path
            assert answer.headers["retry-after"] == "1"


async def in_chunks(data):
    """A body without a length."""
    yield data


@asynchronous
async def test_limits_of_files_and_batches(tmp_path, monkeypatch):
    """Each at its boundary and one past it."""
    monkeypatch.setattr(limits, "MAX_FILE_BYTES", 4000)
    monkeypatch.setattr(limits, "MAX_BATCH_REQUESTS", 20)
    monkeypatch.setattr(limits, "MAX_OPEN_BATCHES", 1)
    async with serving(tmp_path, most_bytes=20_000) as server:
        client, http = server.openai(), server.http
        await client.files.create(file=("x", b"x" * 4000), purpose="batch")
        for form in ({"file": b"x" * 4001}, {"file": b"x" * 100_000}):
            answer = await http.post("/v1/files", files=form, data={"purpose": "batch"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (413, "file")
        batch = await ended(client, await begun(client, lines_of(20)))
        assert batch.status == "completed"
        batch = await ended(client, await begun(client, lines_of(21)))
        assert batch.status == "failed" and batch.errors.data[0].message == (
            "line 21: it is over the 20 requests of a batch: split the file before it"
        )
        server.answers.open.clear()
        held = await begun(client, lines_of(1))
        with pytest.raises(openai.InternalServerError, match="1 batches are worked on"):
            await begun(client, lines_of(1))
        server.answers.open.set()
        await ended(client, held)
        for most, name in ((7, "MAX_FILES"), (1, None)):
            if name:
                monkeypatch.setattr(limits, name, most)
            else:
                monkeypatch.undo()
                server.batches.most_bytes = 1
            with pytest.raises(openai.APIStatusError, match="keeps no more files") as error:
                await client.files.create(file=("x", b"y"), purpose="batch")
            assert error.value.status_code == 413
        form = {"files": {"file": b"x" * 900}, "data": {"purpose": "batch"}}
        chunks = http.build_request("POST", "/v1/files", **form)
        await chunks.aread()
        kind = chunks.headers["content-type"]
        left = server.batches.store.size()[1]
        for more, status in ((899, 413), (900, 200)):
            server.batches.most_bytes = left + more
            parts = in_chunks(chunks.content)
            answer = await http.post("/v1/files", content=parts, headers={"content-type": kind})
            assert answer.status_code == status
        monkeypatch.setattr(limits, "FILE_TIMEOUT", 0.05)

        async def slow():
            yield b"--b\r\n"
            await asyncio.Event().wait()

        server.batches.most_bytes = 1 << 20
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await http.post("/v1/files", content=slow(), headers=kind)
        assert answer.status_code == 408


PART = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
FILE, PURPOSE = PART % (b"file", b'; filename="x"', b"y"), PART % (b"purpose", b"", b"batch")
END = b"--b--\r\n"
FORMS = {
    "no file": (PURPOSE + END, 400, "file"),
    "no purpose": (FILE + END, 400, "purpose"),
    "another purpose": (FILE + PART % (b"purpose", b"", b"fine-tune") + END, 400, "purpose"),
    "two files": (FILE + FILE + PURPOSE + END, 400, "file"),
    "expires_after": (
        FILE + PART % (b"expires_after[anchor]", b"", b"x") + END,
        400,
        "expires_after",
    ),
    "unknown field": (FILE + PART % (b"other", b"", b"x") + PURPOSE + END, 400, "other"),
    "cut off": (FILE + PURPOSE, 400, None),
    "another boundary": (b"--c\r\n\r\n", 400, None),
    "a long field": (PART % (b"purpose", b"", b"x" * 5000) + FILE + END, 400, "purpose"),
    "long headers": (PART % (b"file", b"; a=" + b"x" * 50_000, b"y") + END, 400, None),
    "nothing": (b"", 400, None),
}


@asynchronous
async def test_wrong_forms_are_refused_and_leave_nothing(tmp_path):
    async with serving(tmp_path) as server:
        post = server.http.post
        kind = {"content-type": "multipart/form-data; boundary=b"}
        right = await post("/v1/files", content=PURPOSE + FILE + END, headers=kind)
        assert right.status_code == 200
        for name, (form, status, param) in FORMS.items():
            answer = await post("/v1/files", content=form, headers=kind)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), (name, error)
        long = "multipart/form-data; boundary=" + "b" * 300
        for other in ("application/json", long, "multipart/form-data", "text/plain; boundary=b"):
            answer = await post("/v1/files", content=FILE, headers={"content-type": other})
            assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")
        assert len([*(tmp_path / "files").iterdir()]) == 1


@asynchronous
async def test_wrong_bodies_queries_and_names_are_refused(tmp_path):
    async with serving(tmp_path) as server:
        http = server.http
        file = (await server.openai().files.create(file=("x", b"y"), purpose="batch")).id
        right = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        for fields, param in (
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"input_file_id": "../keys"}, "input_file_id"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": {"a": "x" * 513}}, "metadata"),
            ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
            ({"other": 1}, "other"),
        ):
            answer = await http.post("/v1/batches", json=right | fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
        long = "limit=" + "1" * 5000
        for query in ("limit=0", "limit=101", "limit=x", long, "order=up", "after=batch_x"):
            answer = await http.get(f"/v1/batches?{query}")
            assert answer.status_code == 400, query
        for path in (
            "/v1/files/..%2f..%2fkeys/content",
            "/v1/files/lock",
            "/v1/batches/x",
            f"/v1/files/{file}%00",
        ):
            assert (await http.get(path)).status_code == 404, path
        assert (await http.post("/v1/batches/x/cancel")).status_code == 404
        assert (await http.put(f"/v1/files/{file}")).status_code == 405


@asynchronous
async def test_erasure_reaches_answers_and_requests(tmp_path):
    async with serving(tmp_path) as server:
        client = server.openai()
        batch = await ended(client, await begun(client, lines_of(4, user="secret-of-all")))
        output = await read(client, batch.output_file_id)
        named = [line["response"]["request_id"] for line in output]
        eraser = BatchStore(tmp_path, lock=False)
        assert eraser.erase([named[1], "unknown", named[2]]) == 2
        assert eraser.erase(named[1:2]) == 0
        eraser.close()
        left = await read(client, batch.output_file_id)
        assert [line["custom_id"] for line in left] == ["r0", "r1", "r2", "r3"]
        for old, new, gone in zip(output, left, (0, 1, 1, 0), strict=True):
            assert new == old if not gone else new["response"] is None
        assert left[1]["error"]["code"] == "erased"
        sent = await read(client, batch.input_file_id)
        assert [bool(line["body"]) for line in sent] == [True, False, False, True]
        for name in (batch.input_file_id, batch.output_file_id):
            size = (await client.files.retrieve(name)).bytes
            assert size == len((await client.files.content(name)).content)
        assert (await client.batches.retrieve(batch.id)).tpdet == {"output_digest": None}
        data = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        for number, there in enumerate((True, False, False, True)):
            assert (named[number].encode() in data) is there
            assert (f'"prompt":"p{number}"'.encode() in data.replace(b" ", b"")) is there
