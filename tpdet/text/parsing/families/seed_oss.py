"""Seed-OSS: a tag for each parameter, `<seed:tool_call>` around the function."""

from tpdet.text.parsing.family import CallFamily, Tags

FAMILY = CallFamily(
    name="seed_oss",
    form="tagged",
    tool_names=("seed_oss",),
    template=("<seed:tool_call>",),
    begin=("<seed:tool_call>",),
    end=("</seed:tool_call>",),
    text=("<seed:tool_call>", "</seed:tool_call>"),
    tags=Tags(
        call_begin="<function=",
        name_end=">",
        key_begin="<parameter=",
        key_end=">",
        value_begin="",
        value_end="</parameter>",
        call_end="</function>",
    ),
)
