"""Requests of agents, as they were recorded, and what of their answers they do not determine."""

import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple

Json = dict[str, Any]
FILE = Path(__file__).with_name("requests.jsonl.xz")
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
FREE_FIELDS = {
    PATHS[0]: ("created", "usage.prompt_tokens_details", "usage.completion_tokens_details"),
    PATHS[1]: ("created_at", "completed_at", "usage.input_tokens_details.cached_tokens"),
    PATHS[2]: ("usage.cache_read_input_tokens", "usage.input_tokens"),
}
"""Fields of an answer that its request does not determine: times, and counts of saved work.

A message's `input_tokens` are those that were not cached.
"""
LIMITS = dict(zip(PATHS, ("max_tokens", "max_output_tokens", "max_tokens"), strict=True))
_OTHER_LIMIT = "max_completion_tokens"  # of chats, the newer name


class RecordedRequest(NamedTuple):
    """A body that a client sent to a path, and what it was told when it was recorded."""

    client: str
    path: str
    said: str
    body: Json

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]

    def limited(self, most: int) -> Json:
        """The body with an answer of so many tokens at most, which shows its ids, and no stream."""
        body = {k: v for k, v in self.body.items() if k not in ("stream", "stream_options")}
        limit = LIMITS[self.route]
        asked = body.pop(_OTHER_LIMIT, None) or body.get(limit) or most
        return body | {limit: min(asked, most), "return_token_ids": True}

    def without_free(self, answer: Json) -> Json:
        """An answer without what its request does not determine; without tools its id is random."""
        kept: Json = json.loads(json.dumps(answer))
        names = FREE_FIELDS[self.route]
        if self.route == PATHS[0] and not self.body.get("tools"):
            names = (*names, "id")
        for name in names:
            *outer, inner = name.split(".")
            place = kept
            for each in outer:
                place = place[each]
            place.pop(inner)
        return kept


def recorded_requests() -> list[RecordedRequest]:
    """All of them: a third a route."""
    lines = lzma.decompress(FILE.read_bytes()).decode().splitlines()
    return [RecordedRequest(**json.loads(line)) for line in lines]
