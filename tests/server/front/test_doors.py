"""Who may use the control routes: by which listener, with which key, from where."""

import asyncio
import hashlib
import json
from functools import cache
from types import SimpleNamespace

import blake3
import httpx
import pytest

from tpdet.errors import NotFoundError, NotPermittedError, UsageError
from tpdet.server.about.operations import CONTROL_OPERATIONS
from tpdet.server.front.app import Services, make_app
from tpdet.server.front.door import AdminDoor, Door, owner_of
from tpdet.server.front.middleware import RequestMiddleware
from tpdet.server.settings.addresses import split_address
from tpdet.server.settings.keys import KeyRing, read_key_file
from tpdet.server.settings.settings import load_settings
from tpdet.server.wire.protocol import Controlled

API, ADMIN = "of-the-api", "of-the-admin"
OWN = "http://127.0.0.1:8001"


def ring(*keys):
    return KeyRing(tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys))


DOORS = {
    "closed": Door(ring(API)),
    "open": Door(KeyRing(())),  # no keys at all: control routes stay closed
    "public": Door(ring(API), ring(ADMIN)),
    "admin": AdminDoor(KeyRing(()), "127.0.0.1"),
    "named": AdminDoor(KeyRing(()), "localhost"),
    "far": AdminDoor(ring(ADMIN), "0.0.0.0"),
}


class Client:
    """An engine that does what it is told."""

    def __init__(self):
        self.told = []
        self.metrics = SimpleNamespace(rejected=lambda code: None)

    async def control(self, verb, body):
        self.told.append((verb, json.loads(body)))
        return Controlled(1, 200, b'{"done":true}')


@cache
def behind(door):
    """An application behind a door, and its engine."""
    client = Client()
    services = Services(client, None, None, None, "m", 1.0, 0, True)
    app = make_app(services, DOORS[door].has_control)
    return client, RequestMiddleware(app, app.routes, DOORS[door], 1.0, lambda code: None)


def ask(door, path="/pause", method="POST", key=None, url=OWN, **options):
    """The answer, and what reached the engine."""
    client, guarded = behind(door)
    client.told = []
    headers = dict(options.pop("headers", {}))
    if key is not None:
        headers["authorization"] = f"Bearer {key}"

    async def send():
        transport = httpx.ASGITransport(app=guarded)
        async with httpx.AsyncClient(transport=transport, base_url=url) as http:
            return await http.request(method, path, headers=headers, **options)

    answer = asyncio.run(send())
    control = path.partition("?")[0] in CONTROL_OPERATIONS
    assert bool(client.told) is (answer.status_code == 200 and control)
    return answer, client.told


def refusal(answer):
    return answer.status_code, answer.json()["error"]["code"]


GROUP = {"master_address": "127.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 2}
FIELDS = {
    "/update_weight_version": {"new_version": "v"},
    "/init_weight_transfer_engine": {"init_info": GROUP},
    "/update_weights_from_disk": {"model_path": "step-1"},
    "/init_weights_update_group": GROUP,
    "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
}
"""Bodies of the routes that have fields without which nothing can be done."""


@pytest.mark.parametrize("door", ["public", "admin", "named", "far"])
@pytest.mark.parametrize("path", CONTROL_OPERATIONS)
def test_every_control_route_is_open_to_whom_it_should_be(door, path):
    reads = ("/is_paused", "/weight_info", "/get_weight_version")
    body = {"json": FIELDS[path]} if path in FIELDS else {}
    method = "GET" if path in reads else "POST"
    key = ADMIN if door in ("public", "far") else None
    answer, _ = ask(door, path, method, key, **body)
    assert answer.status_code == 200 and answer.json() == {"done": True}
    wrong, _ = ask(door, path, "PUT", key)
    assert refusal(wrong) == (405, "method_not_allowed") and method in wrong.headers["allow"]


@pytest.mark.parametrize(
    ("door", "key", "status"),
    [
        ("closed", None, 401),
        ("closed", ADMIN, 401),  # it is no API key
        ("closed", API, 404),
        ("open", None, 404),
        ("open", ADMIN, 404),
        ("public", None, 401),
        ("public", API, 401),
        ("public", "wrong", 401),
        ("public", ADMIN[:-1], 401),
        ("public", ADMIN + " x", 401),
        ("far", None, 401),
        ("far", API, 401),
    ],
)
def test_without_its_key_no_control_route_does_anything(door, key, status):
    for path in CONTROL_OPERATIONS:
        answer, told = ask(door, path, "POST", key)
        assert (answer.status_code, told) == (status, [])
        if status == 404:
            message = answer.json()["error"]["message"]
            assert "--admin-key-file" in message and "--admin-listen" in message


def test_the_admin_key_is_taken_as_a_bearer_token_only():
    for value in (f"Basic {ADMIN}", ADMIN, f"bearer{ADMIN}", "Bearer ", f"Bearer {ADMIN},{ADMIN}"):
        answer, _ = ask("public", headers={"authorization": value})
        assert refusal(answer) == (401, "invalid_api_key"), value
    answer, _ = ask("public", headers={"x-api-key": ADMIN})
    assert refusal(answer) == (401, "invalid_api_key")
    assert ask("public", headers={"authorization": f"bEARER {ADMIN}"})[0].status_code == 200


def test_the_admin_key_is_no_api_key_and_the_other_way_round():
    assert refusal(ask("public", "/v1/nothing", "GET", ADMIN)[0]) == (401, "invalid_api_key")
    assert refusal(ask("public", "/v1/nothing", "GET", API)[0]) == (404, "not_found")
    assert ask("admin", "/v1/nothing", "GET")[0].status_code == 404  # data routes need none there
    assert ask("far", "/v1/nothing", "GET")[0].status_code == 401


@pytest.mark.parametrize("door", ["admin", "named", "far"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:8001"},  # even its own: it has no pages
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-origin"},
    ],
)
@pytest.mark.parametrize("path", ["/pause", "/flush_cache", "/v1/completions", "/health"])
def test_the_admin_listener_refuses_what_a_browser_sends(door, headers, path):
    for method in ("POST", "GET"):
        answer, _ = ask(door, path, method, ADMIN, headers=headers)
        assert refusal(answer) == (403, "foreign_origin")


@pytest.mark.parametrize(
    ("door", "host", "status"),
    [
        ("admin", "127.0.0.1", 200),
        ("admin", "127.0.0.1:8001", 200),
        ("admin", "127.9.9.9:1", 200),
        ("admin", "localhost:8001", 200),
        ("admin", "LOCALHOST", 200),
        ("admin", "[::1]:8001", 200),
        ("admin", "evil.example", 403),  # DNS that says 127.0.0.1
        ("admin", "evil.example:8001", 403),
        ("admin", "127.0.0.1.evil.example", 403),
        ("admin", "localhost.evil.example", 403),
        ("admin", "localhost@evil.example", 403),
        ("admin", "10.0.0.1:8001", 403),
        ("admin", "0.0.0.0:8001", 403),
        ("admin", "[::2]", 403),
        ("admin", "", 403),
        ("named", "localhost", 200),
        ("named", "evil.example", 403),
        ("far", "10.0.0.1:8001", 200),  # an address is not found by DNS
        ("far", "evil.example", 403),
    ],
)
def test_the_admin_listener_answers_to_its_own_names(door, host, status):
    answer, _ = ask(door, "/pause", key=ADMIN, headers={"host": host})
    assert answer.status_code == status, host
    if status == 403:
        assert refusal(answer)[1] == "foreign_origin"


def test_fields_come_by_the_query_and_by_the_body_and_are_checked():
    told = [("pause", {"mode": "keep", "clear_cache": False, "keep_kv": False})]
    assert ask("admin", "/pause?mode=keep&clear_cache=false")[1] == told
    assert ask("admin", "/pause", json={"mode": "keep", "clear_cache": False})[1] == told
    assert ask("admin", "/pause")[1] == [
        ("pause", {"mode": "abort", "clear_cache": True, "keep_kv": False})
    ]
    for wrong in (
        {"path": "/pause?mode=stop"},
        {"path": "/pause?mode=keep&mode=abort"},
        {"path": "/pause?mode=keep", "json": {"mode": "keep"}},
        {"path": "/pause?and=more"},
        {"path": "/pause?clear_cache=maybe"},
        {"path": "/pause", "json": {"mode": 1}},
        {"path": "/pause", "json": {"and": "more"}},
        {"path": "/abort_requests", "json": {"request_ids": "all"}},
        {"path": "/update_weight_version"},
    ):
        answer, told = ask("admin", **wrong)
        assert answer.status_code == 400 and not told, wrong
    assert ask("admin", content=b"{}", headers={"content-type": "text/plain"})[0].status_code == 415


def load(*flags):
    return load_settings(["--model=m", *flags], "test").server


def test_the_admin_listener_is_for_this_machine_unless_the_operator_says_otherwise(tmp_path):
    assert load().admin_address is None
    assert load("--admin-listen=127.0.0.1:0").admin_address == ("127.0.0.1", 0)
    assert load("--admin-listen=[::1]:9").admin_address == ("::1", 9)
    assert load("--admin-listen=localhost:9").admin_address == ("localhost", 9)
    for address in ("0.0.0.0:9", "10.0.0.1:9", "[::]:9", "example.org:9"):
        with pytest.raises(UsageError, match="can be reached from other machines"):
            load(f"--admin-listen={address}")
        assert not load(f"--admin-listen={address}", "--admin-insecure").admin_asks
        assert load(f"--admin-listen={address}", "--admin-key-file=k").admin_asks
    assert not load("--admin-listen=127.0.0.1:9", "--admin-key-file=k").admin_asks
    for wrong in ("127.0.0.1", "9", ":9", "127.0.0.1:x", "127.0.0.1:65536", "h:-1", "h:٣"):
        with pytest.raises(UsageError, match="no HOST:PORT"):
            load(f"--admin-listen={wrong}")
        with pytest.raises(ValueError, match="no HOST:PORT"):
            split_address(wrong)
    with pytest.raises(UsageError, match="TPDET_ADMIN_INSECURE"):
        load_settings(["--model=m"], "test", {"TPDET_ADMIN_INSECURE": "1"})


def test_weights_come_by_control_routes_from_senders_that_have_names():
    for flag in ("--weights-root=w", "--weights-peers=10.0.0.1"):
        with pytest.raises(UsageError, match=r"none is open: give --admin-listen"):
            load(flag)
        assert load(flag, "--admin-listen=127.0.0.1:0") and load(flag, "--admin-key-file=k")
    with pytest.raises(UsageError, match=r"--weights-peers ' , ' names no address"):
        load("--weights-peers= , ", "--admin-listen=127.0.0.1:0")
    assert load("--weights-peers=a, b", "--admin-key-file=k").senders == ("a", "b")


def test_the_admin_keys_file_is_read_as_the_api_keys_is(tmp_path):
    file = tmp_path / "admin"
    with pytest.raises(NotFoundError, match="--admin-key-file"):
        read_key_file(str(file), "--admin-key-file")
    file.write_text(f"# who may\n\n{ADMIN}\n")
    file.chmod(0o640)
    with pytest.raises(NotPermittedError, match=f"--admin-key-file {file} has mode 0640"):
        read_key_file(str(file), "--admin-key-file")
    file.chmod(0o600)
    found = read_key_file(str(file), "--admin-key-file")
    assert found == (hashlib.sha256(ADMIN.encode()).hexdigest(),)
    file.write_text("\n")
    with pytest.raises(UsageError, match=f"--admin-key-file {file} holds no key"):
        read_key_file(str(file), "--admin-key-file")


def test_an_owner_is_its_key_and_nobody_where_no_key_is_asked_for():
    def owner(key, salt="of this run"):
        scope = {"tpdet": SimpleNamespace(tenant_salt=salt), "headers": []}
        if key is not None:
            scope["headers"].append((b"authorization", key))
        return owner_of(scope)

    expected = blake3.blake3(b"tpdet-owner-1\nsk-1").hexdigest()
    assert owner(b"Bearer sk-1") == owner(b"bearer  sk-1 ", "of another") == expected
    assert owner(b"Bearer sk-2") != expected
    assert owner(b"Bearer sk-1", salt="") == owner(None, salt="") == ""
