"""The page for browsers, in a browser; and what the API says of itself and of other paths."""

import os
from pathlib import Path

import pytest

from tests.lib.headless import PROGRAM, Browser
from tests.lib.server.harness import MODEL, Server, refused
from tpdet.requests.answer.messages import is_of_messages
from tpdet.requests.body.limits import all_limits
from tpdet.server.about.operations import ELSEWHERE, OPERATIONS
from tpdet.server.about.page import Page

NASTY = """</title></style></pre><script>alert(1)</script><img src=x onerror='alert(2)'>"&'"""
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    """A server whose model has a name that tries to be a script."""
    found = Server(tmp_path_factory.mktemp("n"), "--served-model-name", NASTY)
    yield found
    assert found.stop() == 0, found.log.read_text()


@pytest.fixture
def browser(tmp_path):
    found = Browser(tmp_path / "profile")
    yield found
    found.close()


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_renders_and_asks_nobody_else(server, browser, dark):
    for path in ("/", "/docs"):
        browser.open(server.url + path, dark)
        assert browser.evaluate("document.title") == f"{MODEL} · tpdet"
        text = browser.evaluate("document.body.innerText")
        for shown in (*OPERATIONS, *all_limits(), "curl http://127.0.0.1", '"max_tokens": 64'):
            assert shown in text or shown in ("/", "/docs"), shown
        # The style sheet was let in, and nothing is wider than the window.
        back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(20, 23, 26)" if dark else "rgb(247, 247, 244)")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    browser.open(server.url, dark, width=380, height=800)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints == []
    own = server.url + "/"
    assert {url for url in browser.requests if not url.startswith(own)} <= {"data:,"}
    if folder := os.environ.get("TPDET_TEST_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"page-narrow-{dark}.png")
        browser.open(server.url, dark)
        browser.screenshot(Path(folder) / f"page-{dark}.png")


@needs_browser
def test_no_name_of_a_model_becomes_a_script(nasty, browser):
    browser.open(nasty.url + "/docs")
    assert browser.evaluate("document.title") == f"{NASTY} · tpdet"
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
    assert browser.evaluate("document.querySelector('dd').innerText") == NASTY
    assert browser.complaints == []
    # Negative control: what the name wants would be refused even if it became a part of the page.
    browser.evaluate("document.body.append(document.createElement('script'))")
    browser.evaluate("document.querySelector('script').textContent = 'document.title = 1'")
    assert browser.evaluate("document.title") == f"{NASTY} · tpdet"
    browser.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://x.invalid/'}))")
    browser.open(nasty.url + "/health")
    refused_parts = [str(c) for c in browser.complaints if "Content Security Policy" in str(c)]
    assert len(refused_parts) == 2, browser.complaints


def test_the_page_is_one_answer_with_a_strict_policy(server):
    for path in ("/", "/docs"):
        found = server.http.get(path, headers={"accept": "text/html"})
        assert found.status_code == 200
        assert found.headers["content-type"] == "text/html; charset=utf-8"
        policy = found.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy and "script-src" not in policy
        assert "<script" not in found.text and "https://" not in found.text
        assert found.text.count("http://") == found.text.count(server.url)
    facts = {"model": NASTY, "context": "?"}
    page = Page(NASTY, "http://127.0.0.1:1", True, facts).body.decode()
    assert NASTY not in page and "<script" not in page and "<img" not in page
    assert "Authorization: Bearer $API_KEY" in page


def test_every_operation_is_described(server):
    document = server.http.get("/openapi.json").json()
    assert document["paths"].keys() == OPERATIONS.keys()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert len(operation["summary"]) > 5 and len(operation["description"]) > 20, path


def test_an_unknown_path_is_json_that_says_where_to_look(server):
    for accept in ("application/json", "text/html", "*/*"):
        error = refused(server.http.get("/nothing", headers={"accept": accept}), 404)
        assert "/openapi.json" in error["message"] and "/v1/models" in error["message"]
    for path, remedy in ELSEWHERE.items():
        for found in (server.http.get(path), server.http.post(path, json={})):
            if is_of_messages(path):
                assert found.status_code == 404 and found.json()["type"] == "error"
                assert found.json()["error"]["message"].endswith(remedy)
            else:
                assert refused(found, 404)["message"].endswith(remedy)
