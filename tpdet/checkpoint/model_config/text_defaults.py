"""What transformers' class of a text part has where `text_config` leaves a key out.

Checkpoints with images were saved as differences from it (LLaVA-1.5 has 6 keys of a Llama). A whole
text model states its keys; one that does not is refused.
"""

import json
from pathlib import Path
from typing import Any

_BY_TYPE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""By `model_type`; a base of the rotary embedding stands where it is not the family's own."""


def completed(kind: str, stated: dict[str, Any]) -> dict[str, Any]:
    """What a text part of a `model_type` states, and its class's values of keys that it lacks."""
    usual: dict[str, Any] = {**_BY_TYPE.get(kind, {})}
    rotary = [stated.get(key) for key in ("rope_scaling", "rope_parameters")]
    if any(isinstance(one, dict) and "rope_theta" in one for one in rotary):
        usual.pop("rope_theta", None)
    return usual | stated
