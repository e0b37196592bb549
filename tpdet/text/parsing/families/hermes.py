"""Hermes 2 Pro, Qwen2.5, Qwen3, Granite 4: JSON between `<tool_call>` and `</tool_call>`."""

from tpdet.text.parsing.family import CallFamily

FAMILY = CallFamily(
    name="hermes",
    form="json",
    tool_names=("hermes", "qwen3_json", "qwen", "qwen25", "granite4"),
    template=("<tool_call>",),
    begin=("<tool_call>",),
    end=("</tool_call>",),
    text=("<tool_call>", "</tool_call>"),
)
