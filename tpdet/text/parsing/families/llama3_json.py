"""Llama 3: an answer that is one object of JSON, or several with semicolons between them."""

from tpdet.text.parsing.family import CallFamily

FAMILY = CallFamily(
    name="llama3_json",
    form="json",
    tool_names=("llama3_json", "llama4_json", "llama3"),
    template=("<|start_header_id|>", '"parameters"'),
    begin=("<|python_tag|>",),
    unmarked="{",
    separator=";",
    needs_end=False,
)
