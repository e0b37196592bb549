"""The page for browsers: routes, limits and a first request, in one answer without any script.

Its content policy admits nothing but its own style sheet, so no model's name can run or load
anything.
"""

import json

from starlette.responses import Response

from tpdet.pages.page import render
from tpdet.requests.body import limits
from tpdet.requests.routes import CHATS, PATHS
from tpdet.server.about.operations import OPERATIONS

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
        page = render(
            "tpdet.server.about/page.html",
            "tpdet.server.about/page.css",
            served=True,
            title=f"{model} · tpdet",
            url=url,
            facts=facts,
            links=_LINKS,
            curl=_curl(model, url, guarded),
            routes=[_route(path) for path in OPERATIONS if path not in ("/", "/docs")],
            limits=[(name, _limit(value)) for name, value in limits.all_limits().items()],
        )
        headers = {
            "content-security-policy": f"{page.policy}; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-store",
        }
        super().__init__(page.html, headers=headers)


def _curl(model: str, url: str, guarded: bool) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    key = '  -H "Authorization: Bearer $API_KEY" \\\n' if guarded else ""
    return f"curl {url}{CHATS} \\\n{key}  -H 'Content-Type: application/json' \\\n  -d '{quoted}'\n"


def _route(path: str) -> dict[str, str]:
    return {
        "path": path,
        "method": "POST" if path in PATHS else "GET",
        **OPERATIONS[path]._asdict(),
    }


def _limit(value: object) -> str:
    return " to ".join(map(str, value)) if isinstance(value, list) else str(value)
