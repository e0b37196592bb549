"""Outputs of families of which canitoolcall has none, and what transformers reads in them.

`python -m tests.text.parsing.oracle` writes them to outputs.json.
"""

import json
import re
from pathlib import Path

FILE = Path(__file__).with_name("outputs.json")
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "detailed": {"type": "boolean"},
            "limit": {"type": "number"},
            "unit": {"type": ["string", "null"]},
            "where": {"type": "object"},
            "tags": {"type": "array"},
        },
    },
    "get_time": {"type": "object", "properties": {}},
}
ARGUMENTS = (
    {"city": "Paris"},
    {"city": "Zürich", "days": 3},
    {"city": "東京 🌸", "detailed": True},
    {"city": "a 'b' c", "limit": 2.5},
    {"city": 'say "hi"', "detailed": False, "days": -1},
    {"city": "line 1\n\tline 2", "days": 0},
    {"city": "back\\slash", "where": {"x": {"y": [1, 2]}, "z": None}},
    {"tags": ["a", "b, c", "d)e]f"], "days": 10},
    {"city": "{'not': json}", "limit": -0.5},
    {"city": "02139", "tags": []},
    {"city": "get_time()", "where": {}},
    {"city": "  two  spaces ", "detailed": True},
    {"city": "</x> & <y>", "tags": [1, {"k": "v"}]},
    {"city": "true", "limit": 1e21},
)
"""Each output calls `get_weather` with one; every third calls `get_time` too, every fourth begins
with text.
"""


def _json(name, arguments):
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _python(name, arguments):
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def _tagged(name, arguments):
    values = (
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in arguments.items()
    )
    tags = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values)
    return f"<seed:tool_call>\n<function={name}>\n{tags}</function>\n</seed:tool_call>"


def _list(form, calls):
    return "[" + ", ".join(form(*call) for call in calls) + "]"


WRITE = {
    "granite": lambda calls: "<|tool_call|>" + _list(_json, calls),
    "phi4_mini": lambda calls: f"<|tool_call|>{_list(_json, calls)}<|/tool_call|>",
    "olmo3": lambda calls: (
        "<function_calls>\n" + "\n".join(_python(*call) for call in calls) + "\n</function_calls>"
    ),
    "seed_oss": lambda calls: "\n".join(_tagged(*call) for call in calls),
    "pythonic": lambda calls: _list(_python, calls),
}
_CALLED = {"function": {"name": "{name}", "arguments": "{arguments}"}}
_LIST = {"transform": _CALLED, "transform_each": True}
READ = {
    "granite": {"open": "<|tool_call|>", "content": "json", **_LIST},
    "phi4_mini": {"open": "<|tool_call|>", "close": "<|/tool_call|>", "content": "json", **_LIST},
    "olmo3": {
        "open": "<function_calls>",
        "close": "</function_calls>",
        "content": "python-call-list",
        **_LIST,
    },
    "seed_oss": {
        "open_pattern": r"<seed:tool_call>\s*<function=(?P<name>[^>]+)>",
        "close_pattern": r"</function>\s*</seed:tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>]+)>(?P<value>.*?)</parameter>",
        },
        "repeats": True,
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    },
    "pythonic": {"open_pattern": r"(?=\[[a-z_]+\()", "content": "python-call-list", **_LIST},
}
"""The field of calls in a response template of each family."""


def outputs(family) -> list[str]:
    """Twenty outputs as models of the family write them."""
    made = []
    for i in range(20):
        calls = [("get_weather", ARGUMENTS[i % len(ARGUMENTS)])]
        if i >= len(ARGUMENTS):
            calls = [("get_time", {}), ("get_weather", ARGUMENTS[(5 * i) % len(ARGUMENTS)])]
        if i % 3 == 2:
            calls.append(("get_time", {}))
        text = "" if i % 4 or family == "pythonic" else "I look it up.\n"
        made.append(text + WRITE[family](calls))
    return made


def read(family, text) -> dict:
    """What transformers' parser reads."""
    from transformers.utils.chat_parsing import parse_response

    if family == "olmo3":  # it reads calls in brackets alone
        begin, end = "<function_calls>", "</function_calls>"
        before, _, lines = text.partition(begin)
        calls = re.sub(r"\)\n(?=get_)", "), ", lines.removesuffix(end).strip())
        text = f"{before}{begin}[{calls}]{end}"
    template = {
        "start_anchor": "<|none|>",
        "fields": {"tool_calls": READ[family], "content": {"repeats": True, "join": ""}},
    }
    functions = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in TOOLS.items()
    ]
    found = parse_response(text, template, prefix="", tools=functions)
    calls = [call["function"] for call in found.get("tool_calls", [])]
    return {"content": found.get("content", ""), "calls": calls}


def main():
    """Writes the outputs and what is read of them."""
    found = {
        family: [{"text": text} | read(family, text) for text in outputs(family)]
        for family in WRITE
    }
    FILE.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
