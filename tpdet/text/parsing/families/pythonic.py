"""Llama 3.2 and Llama 4: an answer that is a list of calls as Python writes them."""

from tpdet.text.parsing.family import CallFamily

FAMILY = CallFamily(
    name="pythonic",
    form="python",
    tool_names=("pythonic", "llama4_pythonic", "llama4"),
    template=("<|header_start|>",),
    begin=("<|python_start|>",),
    end=("<|python_end|>",),
    unmarked="[",
    needs_end=False,
)
