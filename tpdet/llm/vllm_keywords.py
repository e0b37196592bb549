"""Keywords of vLLM's calls that tpdet's calls lack, and their values that ask for nothing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpdet.arguments.suggestions import did_you_mean
from tpdet.errors import RequestError
from tpdet.requests.sampling_params import SamplingParams

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
KEYWORDS: dict[str, list[Any]] = _TABLES["keywords"]
"""By name: the reason or remedy of a refusal, then the values beside None that change nothing."""
METHODS: dict[str, str] = _TABLES["methods"]
"""vLLM's methods that are none here, and what to use instead."""


def refuse_what_asks(call: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Return if every keyword of `given` asks for nothing, or is a list of what asks for nothing.

    known: the keywords that `call` takes. Raises RequestError with the remedy for another value,
    TypeError as Python does for a keyword that nobody knows.
    """
    for name, value in given.items():
        if name not in KEYWORDS:
            if name in SamplingParams.__struct_fields__:
                hint = f": give it in sampling_params=SamplingParams({name}=...)"
            else:
                hint = did_you_mean(name, known)
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")
        remedy, *idle = KEYWORDS[name]
        for each in value if isinstance(value, list | tuple) else (value,):
            if each is not None and each not in idle:
                raise RequestError(f"{name} {value!r:.60} is not supported: {remedy}", name)
