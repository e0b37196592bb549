"""GLM-4.5 and later: a name, and tokens around each key and each value.

GLM-4.5 and 4.6 write a line each, GLM-4.7 and later no line breaks: space between tags is none.
"""

from tpdet.text.parsing.family import CallFamily, Tags

_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

FAMILY = CallFamily(
    name="glm",
    form="tagged",
    tool_names=("glm45", "glm47", "glm"),
    template=("<arg_key>",),
    begin=("<tool_call>",),
    end=("</tool_call>",),
    text=("<tool_call>", "</tool_call>", *_TAGS),
    tags=Tags(
        name_end="",
        key_begin="<arg_key>",
        key_end="</arg_key>",
        value_begin="<arg_value>",
        value_end="</arg_value>",
    ),
)
