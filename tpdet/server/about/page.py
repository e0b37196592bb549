"""The page for browsers: routes, limits and a first request, in one answer without any script.

Its content policy admits nothing but its own style sheet, so no model's name can run or load
anything.
"""

import base64
import hashlib
import json
from html import escape
from importlib.resources import files

from starlette.responses import Response

from tpdet.requests.body import limits
from tpdet.server.about.operations import OPERATIONS

_POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
_LINKS = (
    "/openapi.json", "/health", "/ready", "/metrics", "/version", "/server_info", "/v1/models",
)  # fmt: skip


class Page(Response):
    """The page as an answer.

    model: the served name; url: of this server; guarded: keys are asked for; facts: what to say of
    the server, by name.
    """

    media_type = "text/html"

    def __init__(self, model: str, url: str, guarded: bool, facts: dict[str, str]) -> None:
        style = files("tpdet.server.about").joinpath("page.css").read_text("utf-8")
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        headers = {
            "content-security-policy": f"default-src 'none'; style-src 'sha256-{digest}'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-store",
        }
        super().__init__(_html(style, model, url, guarded, facts), headers=headers)


def _html(style: str, model: str, url: str, guarded: bool, facts: dict[str, str]) -> str:
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    links = "".join(f'<a href="{path}">{path}</a>' for path in _LINKS)
    routes = "".join(_route(path) for path in OPERATIONS if path not in ("/", "/docs"))
    rows = "".join(_limit(name, value) for name, value in limits.all_limits().items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(model)} · tpdet</title><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body><main>"
        f"<h1>tpdet</h1><p class=soft>One model behind the API of OpenAI.</p>"
        f"<dl class=facts>{shown}</dl><nav>{links}</nav>"
        f"<h2>A first request</h2><pre>{escape(_curl(model, url, guarded))}</pre>"
        f"<p class=soft>One click selects all of it. The <code>openai</code> client takes "
        f"<code>base_url=&quot;{escape(url)}/v1&quot;</code>.</p>"
        f"<h2>Routes</h2><div class=card>{routes}</div>"
        f"<h2>Limits</h2><p class=soft>Sizes in bytes, times in seconds, ranges with both ends."
        f"</p><div class=card><table>{rows}</table></div></main></body></html>"
    )


def _curl(model: str, url: str, guarded: bool) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    key = '  -H "Authorization: Bearer $API_KEY" \\\n' if guarded else ""
    return (
        f"curl {url}/v1/chat/completions \\\n{key}"
        f"  -H 'Content-Type: application/json' \\\n  -d '{quoted}'\n"
    )


def _route(path: str) -> str:
    operation = OPERATIONS[path]
    method = "POST" if path in _POSTS else "GET"
    return (
        f'<div class=route><span class="method {method.lower()}">{method}</span><div>'
        f"<code><b>{escape(path)}</b></code>"
        f"<p>{escape(operation.summary)}<br>"
        f"<span class=soft>{escape(operation.description)}</span></p></div></div>"
    )


def _limit(name: str, value: object) -> str:
    shown = " to ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"<tr><td><code>{escape(name)}</code></td><td>{escape(shown)}</td></tr>"
