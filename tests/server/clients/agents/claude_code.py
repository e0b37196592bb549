"""The first request of a coding agent as Claude Code 2.1 sends it, by its shape and its size.

It was described from a recording; its words are made. 49 KB: twelve tools of 32 KB, a system of
three blocks of which the first is about billing, and a message of the system between the others.
"""

import random
from typing import Any

Json = dict[str, Any]
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1.332 (external, sdk-py)",
}
BILLING = "x-anthropic-billing-header: cc_version=2.1.332.{}; cc_entrypoint=sdk-py; cch=00000;"
TOOLS = (
    "Agent", "Bash", "Edit", "Glob", "Grep", "NotebookEdit", "Read", "Skill", "TodoWrite",
    "WebFetch", "WebSearch", "Write",
)  # fmt: skip
_CACHED = {"cache_control": {"type": "ephemeral"}}
_WORDS = (
    "the file path must be absolute and the command runs in a shell whose working directory stays "
    "between calls use it for long tasks never guess an argument quote names with blanks read "
    "before you edit prefer small changes show the lines that were found and say when none were"
).split()


def request(model: str, build: str = "a1b", user: str = "0") -> Json:
    """The body. build: changes what is said of billing; user: who is billed."""
    draw = random.Random(41)
    reminder = f"<system-reminder>\n{prose(draw, 3_000)}\n</system-reminder>"
    task = "Run `echo hello` and tell me what it printed."
    return {
        "model": model,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": reminder},
                    {"type": "text", "text": task, **_CACHED},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": prose(draw, 600)}]},
        ],
        "system": [
            {"type": "text", "text": BILLING.format(build)},
            {"type": "text", "text": "You are an agent that runs commands.", **_CACHED},
            {"type": "text", "text": prose(draw, 12_000), **_CACHED},
        ],
        "tools": [_tool(draw, name) for name in TOOLS],
        "metadata": {"user_id": f"user_{user}_account__session_{build}"},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def _tool(draw: random.Random, name: str) -> Json:
    properties = {
        word: {"type": kind, "description": prose(draw, 120)}
        for word, kind in (("command", "string"), ("timeout", "number"), ("description", "string"))
    }
    return {
        "name": name,
        "description": prose(draw, 2_000),
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": ["command"],
            "additionalProperties": False,
        },
    }


def prose(draw: random.Random, characters: int) -> str:
    """So many characters of words, or one word more."""
    words: list[str] = []
    while sum(map(len, words)) + len(words) < characters:
        words.append(draw.choice(_WORDS))
    return " ".join(words)
