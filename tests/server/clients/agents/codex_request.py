"""A request as Codex CLI 0.169 sends it, by what was seen of its shape; the texts are made up."""

_RULES = "Read the file before you change it, and say in one line what you did. "
_TEXT = {"type": "string", "description": "said in words"}


def function(name, **properties):
    return {
        "type": "function",
        "name": name,
        "description": f"Runs {name} in the workspace.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        },
    }


def said(role, *texts):
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "role": role, "content": parts}


SHELL = function("shell", command=_TEXT)
TOOLS = [
    SHELL,
    function("update_plan", plan={"type": "array", "items": _TEXT}),
    {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [function("spawn", task=_TEXT), function("wait", agent=_TEXT)],
    },
    {"type": "web_search", "external_web_access": False},
]


def first_turn(characters=40_000):
    """The call before any tool ran; characters: of all instructions."""
    rules = _RULES * (characters // len(_RULES))
    return {
        "model": "demo",
        "input": [
            said("developer", rules, "<permissions>The sandbox is read-only.</permissions>"),
            said("user", "<environment_context><cwd>/w</cwd></environment_context>"),
            said("user", "What is in a.txt?"),
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0197f3c2-0000-7000-8000-000000000000",
        "client_metadata": {"x-codex-installation-id": "b6d0"},
    }


def next_turn(body, output, result):
    """The call after the answer's items and the result of each of its calls.

    Items are sent back as Codex does: without ids, and reasoning without its text.
    """
    kept = {
        "reasoning": ("type", "summary", "encrypted_content"),
        "message": ("type", "role", "content"),
        "function_call": ("type", "name", "namespace", "arguments", "call_id"),
    }
    back = [{key: item[key] for key in kept[item["type"]] if key in item} for item in output]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": result}
        for item in output
        if item["type"] == "function_call"
    ]
    return {**body, "input": [*body["input"], *back, *results]}
