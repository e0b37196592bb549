"""Qwen3-Coder, Qwen3.5 and later: a tag for each parameter, `<tool_call>` around the function."""

from tpdet.text.parsing.family import CallFamily, Tags

FAMILY = CallFamily(
    name="qwen3_coder",
    form="tagged",
    tool_names=("qwen3_coder", "qwen3_xml"),
    template=("<function=", "<tool_call>"),
    begin=("<tool_call>", "<function="),
    end=("</tool_call>",),
    text=("<tool_call>", "</tool_call>", "<function="),
    line_begin=("<function=",),  # the models leave <tool_call> out at times
    tags=Tags(
        call_begin="<function=",
        name_end=">",
        key_begin="<parameter=",
        key_end=">",
        value_begin="",
        value_end="</parameter>",
        call_end="</function>",
        line_breaks=True,
    ),
    in_reasoning=True,
)
