"""What an outsider may reach and what may be read afterwards: routes, listeners, logs, metrics."""

import json

import psutil
import pytest

from tests.attack.conftest import KEYS
from tests.lib.server.harness import MODEL

PUBLIC = ("/health", "/health_generate", "/ready", "/metrics", "/version")
SECRET = "xyzzy-plugh"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_but_five_wants_a_key(guarded):
    document = guarded.http.get("/openapi.json", headers=bearer(KEYS[0])).json()
    asked = [*document["paths"], "/openapi.json", "/docs", "/nothing", "//metrics", "/metrics/"]
    for path in asked:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            found = guarded.http.request(method, path, json={} if method == "POST" else None)
            assert (found.status_code == 401) == (path not in PUBLIC), (method, path)
            if path in PUBLIC:
                assert found.status_code == (200 if method in ("GET", "HEAD") else 405)


@pytest.mark.parametrize(
    "header",
    [
        "", "Bearer", KEYS[0], f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x",
        f"Bearer {KEYS[0][:-1]}", f"Bearer {KEYS[0].upper()}", f"Bearer {KEYS[0]},{KEYS[1]}",
        f"Bearer {KEYS[0]} {KEYS[1]}", f"Bearer={KEYS[0]}", "Bearer " + "x" * 8000, "Bearer #",
    ],
)  # fmt: skip
def test_what_is_near_a_key_is_none(guarded, header):
    found = guarded.http.get("/v1/models", headers={"Authorization": header})
    assert found.status_code == 401 and found.headers["www-authenticate"] == "Bearer"
    assert not any(key in found.text for key in KEYS)


def test_a_key_in_the_query_or_a_second_header_does_not_count(guarded):
    assert guarded.http.get(f"/v1/models?api_key={KEYS[0]}").status_code == 401
    twice = [("Authorization", "Bearer no"), ("Authorization", f"Bearer {KEYS[0]}")]
    assert guarded.http.get("/v1/models", headers=twice).status_code == 401


def test_each_key_is_a_tenant_of_its_own_and_nobody_can_name_another(guarded):
    def answer(key: str, **fields) -> object:
        body = {"model": MODEL, "prompt": "x", "seed": 1, "max_tokens": 9, **fields}
        return guarded.http.post("/v1/completions", json=body, headers=bearer(key)).json()

    told = [answer(key, cache_salt="tenant")["choices"] for key in (*KEYS, KEYS[0])]
    assert told[0] == told[2] != told[1]
    assert answer(KEYS[0])["choices"] == answer(KEYS[1])["choices"]
    assert answer(KEYS[0], tenant_salt="x")["error"]["code"] == "unknown_field"


def test_it_listens_on_this_machine_only_and_on_one_port(guarded):
    family = [psutil.Process(guarded.process.pid), guarded.child]
    listening = {
        (c.laddr.ip, c.laddr.port)
        for process in family
        for c in process.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", guarded.port)}


def test_no_prompt_and_no_key_is_in_a_log_a_metric_or_an_error(guarded):
    key = bearer(KEYS[1])
    asked = [
        {"prompt": SECRET, "max_tokens": 3},
        {"prompt": SECRET, "max_tokens": 3, "user": SECRET, "stop": SECRET},
        {"prompt": SECRET, "cache_salt": "nan=1"},
        {"prompt": SECRET, "max_tokens": 10**6},
        {"prompt": SECRET, "stream": True, "n": 2},
        {"prompt": {SECRET: 1}},
        {"prompt": [SECRET, 3]},
    ]
    for body in asked:
        guarded.http.post("/v1/completions", json={"model": MODEL, **body}, headers=key)
    messages = [{"role": "user", "content": SECRET}]
    guarded.http.post("/v1/chat/completions", json={"messages": messages}, headers=key)
    guarded.http.post("/tokenize", json={"prompt": SECRET}, headers=key)
    guarded.http.get(f"/v1/models?key={SECRET}", headers=bearer(SECRET))
    seen = guarded.log.read_text() + guarded.http.get("/metrics").text
    for word in (SECRET, *KEYS):
        assert word not in seen


def test_nothing_of_ours_in_the_environment_or_arguments_holds_a_key(guarded):
    for process in (psutil.Process(guarded.process.pid), guarded.child):
        held = json.dumps([process.cmdline(), process.environ()])
        assert not any(key in held for key in KEYS)
