"""OLMo 3: calls as Python writes them, one a line, in `<function_calls>`."""

from tpdet.text.parsing.family import CallFamily

FAMILY = CallFamily(
    name="olmo3",
    form="python",
    tool_names=("olmo3",),
    template=("<function_calls>",),
    begin=("<function_calls>",),
    end=("</function_calls>",),
    text=("<function_calls>", "</function_calls>"),
)
