"""Ids of HTTP requests; each names the HTTP process that its client is connected to."""

import secrets


def new_request_id(process: int = 0) -> str:
    """32 hex digits: 30 random ones, and the HTTP process's number (0 to 255)."""
    return f"{secrets.token_hex(15)}{process:02x}"


def process_of(request_id: str) -> int:
    """The HTTP process of an engine's request: KIND-ID-NUMBER, the ID as above."""
    return int(request_id[: request_id.rindex("-")][-2:], 16)
