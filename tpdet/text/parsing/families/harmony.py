"""gpt-oss: messages that are addressed to `functions.NAME`; harmony's marks find them."""

from tpdet.text.parsing.family import CallFamily

FAMILY = CallFamily(
    name="harmony",
    form="harmony",
    tool_names=("openai", "gpt-oss", "openai_gptoss"),
    template=("<|channel|>",),
)
