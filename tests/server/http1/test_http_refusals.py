"""HTTP that is refused: by its form, its size, its pace and its key, in a fixed order."""

import http.client
import json
import socket
import time

import pytest

from tests.lib.server.harness import Server, read_all, refused, request_bytes
from tpdet.requests.body.limits import MAX_BODY_BYTES

KEY = "sk-test-1"
JSON = "Content-Type: application/json"


PATH = "/v1/completions"
pytestmark = pytest.mark.usefixtures("unharmed")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    short = {"HEADER_TIMEOUT": 0.6, "BODY_TIMEOUT": 0.6}
    found = Server(tmp_path_factory.mktemp("s"), limits=short)
    yield found
    assert found.stop() == 0, found.log.read_text()


def split(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body


def test_every_error_has_the_one_form(server):
    refused(server.http.get("/nothing"), 404)
    found = server.http.get(PATH)
    refused(found, 405)
    assert found.headers["allow"] == "POST"
    refused(server.http.post("/health", json={}), 405)
    refused(server.http.put("/v1/models", json={}), 405)
    assert server.http.head(PATH).status_code == 405
    assert server.http.options("/health").headers["allow"] == "GET, HEAD"
    refused(server.http.post(PATH, content=b"x=1"), 415)
    text = {"content-type": "application/json; charset=latin-1"}
    error = refused(server.http.post(PATH, content=b"{}", headers=text), 415)
    assert "not 'application/json; charset=latin-1'" in error["message"]
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    error = refused(server.http.post(PATH, content=b"{}", headers=packed), 415)
    assert "not 'gzip'" in error["message"]
    status, headers, _ = split(server.raw(request_bytes(PATH, b"", JSON)))
    assert status == 411 and headers["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/docs", "/v1/models/x"])
def test_head_is_answered_as_get_without_the_content(server, path):
    head, get = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"") and get.content
    assert head.headers["content-length"] == str(len(get.content))
    assert head.headers["content-type"] == get.headers["content-type"]
    one = request_bytes(path, b"", method="HEAD").replace(b"Connection: close\r\n", b"")
    assert server.raw(one * 2 + b"GET /version HTTP/1.0\r\n\r\n").count(b"HTTP/1.1 ") == 3


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/chat/completions", "use /v1/chat/completions"),
        ("/v1/chat/completions/", "use /v1/chat/completions"),
        ("//v1//models", "use /v1/models"),
        ("/v1/chat/completions/chat/completions", "use /v1/chat/completions"),
        ("/openai/deployments/demo/completions", "begins with /v1: use /v1/completions"),
        ("/v1/tokenize", "use /tokenize"),
        ("/v1/health/", "use /health"),
        ("/v1/v1/responses", "use /v1/responses"),
        ("/v1/", "base URL"),
        ("/api/tags", "Ollama's API is not served"),
        ("/" * 5000, "GET /openapi.json lists what there is"),
        ("/v1/models/demo/x/y/z", "is not served here: use 'demo'"),
    ],
)
def test_a_wrong_base_url_is_answered_with_the_path_that_was_meant(server, path, meant):
    _, _, body = split(server.raw(request_bytes(path, b"", method="GET")))
    assert meant in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)  # fmt: skip
def test_what_is_not_http_gets_a_bare_400(server, data):
    status, headers, body = split(server.raw(data))
    assert status in (400, 404) and headers["x-request-id"]
    assert status == 404 or body == b""


def test_100_headers_and_16_kib_pass_and_one_more_is_431(server):
    fixed = 2  # Host and Connection
    for count, expected in ((100, 200), (101, 431), (5000, 431)):
        names = [f"X-{i}: y" for i in range(count - fixed)]
        status, headers, _ = split(server.raw(request_bytes("/health", b"", *names, method="GET")))
        assert status == expected and headers["x-request-id"]
    used = len("Host: x") + 2 + len("Connection: close") + 2 + len("X: ") + 2
    for size, expected in ((16384, 200), (16385, 431), (2 << 20, 431)):
        line = "X: " + "v" * (size - used)
        status, _, _ = split(server.raw(request_bytes("/health", b"", line, method="GET")))
        assert status == expected, size
    status, _, _ = split(server.raw(request_bytes("/" + "u" * 9000, b"", method="GET")))
    assert status == 431


def test_a_head_or_body_that_does_not_come_is_408(server):
    status, headers, _ = split(server.raw(b"GET /health HTTP/1.1\r\nHost:"))
    assert status == 408 and headers["x-request-id"]
    started = time.monotonic()
    answer = server.raw(request_bytes(PATH, b"{", JSON, "Content-Length: 10"))
    status, headers, body = split(answer)
    assert status == 408 and json.loads(body)["error"]["type"] == "invalid_request_error"
    assert time.monotonic() - started < 5
    assert server.raw(b"") == b""  # a connection that says nothing is closed without a word


def test_a_connection_keeps_serving_and_pipelines(server):
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert server.raw(one * 3 + last).count(b"HTTP/1.1 200") == 4
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(one * 500)  # more than may wait: the connection ends, the server lives
        read_all(connection)


def test_expect_100_continue_is_honoured_only_for_bodies_we_want(server):
    wanted = request_bytes(PATH, b"", JSON, "Content-Length: 44", "Expect: 100-continue")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(wanted)
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(b'{"model":"demo","prompt":"x","max_tokens":1}')
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    large = request_bytes(PATH, b"", JSON, "Content-Length: 99999999", "Expect: 100-continue")
    assert split(server.raw(large))[0] == 413


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k")
    keys = folder / "keys"
    keys.write_text(f"# ours\n{KEY}\nsk-test-2\n")
    keys.chmod(0o600)
    found = Server(folder, "--api-key-file", str(keys))
    yield found
    assert found.stop() == 0


def test_errors_come_in_the_order_401_404_405_411_413_415_400(guarded):
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port)
    good, bad = {"Authorization": f"Bearer {KEY}"}, {"Authorization": "Bearer sk-test-3"}
    kind = {"Content-Type": "application/json"}

    def status(method: str, path: str, headers: dict, body: bytes | None = None) -> int:
        connection.request(method, path, body, headers)
        found = connection.getresponse()
        found.read()
        if found.getheader("connection") == "close":
            connection.close()
        return found.status

    assert status("POST", "/nothing", bad) == 401
    assert status("GET", "/v1/models", {}) == 401
    assert status("GET", "/nothing", good) == 404
    assert status("GET", PATH, good) == 405
    assert status("POST", PATH, good | {"Content-Length": str(MAX_BODY_BYTES + 1)}) == 413
    assert status("POST", PATH, good, b"{") == 415
    assert status("POST", PATH, good | kind, b"{") == 400
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert status("GET", path, {}) == 200
    for key in (KEY, "sk-test-2"):
        assert status("GET", "/openapi.json", {"Authorization": f"Bearer {key}"}) == 200
    assert status("GET", "/openapi.json", {"Authorization": f"Basic {KEY}"}) == 401
    assert status("GET", "/openapi.json", {"Authorization": f"Bearer {KEY}x"}) == 401
