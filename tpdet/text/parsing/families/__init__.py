"""How each family of models writes calls of tools, as data."""

from tpdet.text.parsing.families import (
    glm,
    granite,
    harmony,
    hermes,
    llama3_json,
    mistral,
    olmo3,
    phi4_mini,
    pythonic,
    qwen3_coder,
    seed_oss,
)
from tpdet.text.parsing.family import CallFamily

FAMILIES: tuple[CallFamily, ...] = (
    harmony.FAMILY,
    seed_oss.FAMILY,
    qwen3_coder.FAMILY,
    glm.FAMILY,
    mistral.FAMILY,
    olmo3.FAMILY,
    phi4_mini.FAMILY,
    granite.FAMILY,
    hermes.FAMILY,
    pythonic.FAMILY,
    llama3_json.FAMILY,
)
"""In the order in which a template is asked whose it is."""

TOOL_PARSERS = {name: family for family in FAMILIES for name in (family.name, *family.tool_names)}
"""The families by their own names, and by both engines' names of their parsers."""
