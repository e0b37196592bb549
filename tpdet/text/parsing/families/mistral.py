"""Mistral: a list of JSON behind `[TOOL_CALLS]` (v3), or a name and its arguments (v11, v13)."""

from tpdet.text.parsing.family import CallFamily

FAMILY = CallFamily(
    name="mistral",
    form="named_json",
    tool_names=("mistral",),
    template=("[TOOL_CALLS]",),
    begin=("[TOOL_CALLS]",),
    call_id="[CALL_ID]",
    arguments="[ARGS]",
    text=("[TOOL_CALLS]",),
    needs_end=False,
)
