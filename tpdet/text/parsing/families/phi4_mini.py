"""Phi-4-mini: a list of JSON behind `functools`, or between `<|tool_call|>` tokens."""

from tpdet.text.parsing.family import CallFamily

FAMILY = CallFamily(
    name="phi4_mini",
    form="json",
    tool_names=("phi4_mini_json",),
    template=("<|tool|>",),
    begin=("functools", "<|tool_call|>"),
    end=("<|/tool_call|>",),
    text=("functools",),
    needs_end=False,
)
