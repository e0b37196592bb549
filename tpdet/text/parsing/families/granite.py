"""Granite 3: a list of JSON behind `<|tool_call|>` or `<tool_call>`; Granite 4 writes hermes."""

from tpdet.text.parsing.family import CallFamily

FAMILY = CallFamily(
    name="granite",
    form="json",
    tool_names=("granite",),
    template=("<|tool_call|>", "<|start_of_role|>"),
    begin=("<|tool_call|>", "<tool_call>"),
    end=("</tool_call>",),
    text=("<|tool_call|>", "<tool_call>", "</tool_call>"),
    needs_end=False,
)
