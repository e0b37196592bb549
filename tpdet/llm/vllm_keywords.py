"""Keywords of vLLM's calls that tpdet's calls lack, and their values that ask for nothing."""

from collections.abc import Mapping
from typing import Any

from tpdet.arguments.suggestions import did_you_mean
from tpdet.errors import RequestError
from tpdet.requests.sampling_params import SamplingParams

_TEXT = "models read text"
KEYWORDS: dict[str, tuple[tuple[object, ...], str]] = {
    "chat_template_content_format": (
        ("auto", "string"), "a message's parts reach the chat template as one text",
    ),
    "data_parallel_rank": ((0,), "one model is one replica"),
    "guided_options_request": ((), "give SamplingParams(structured_outputs=...)"),
    "lora_request": ((), "adapters are not supported: merge them into the checkpoint"),
    "mm_processor_kwargs": (({},), _TEXT),
    "priority": ((0,), "requests are taken in the order they came"),
    "prompt_adapter_request": ((), "adapters are not supported: merge them into the checkpoint"),
    "reasoning_ended": ((), "give SamplingParams(json_schema_after=...)"),
    "tokenization_kwargs": (({},), "give the ids that are to be read as the prompt"),
    "start_engine_loop": ((True,), "the engine begins at once"),
    "stat_loggers": ((), "a server has metrics: docs/operations.md"),
    "trace_headers": (({},), "there are no traces"),
    "usage_context": (("ENGINE_CONTEXT", "LLM_CLASS", "UNKNOWN_CONTEXT"), "leave it out"),
}  # fmt: skip
"""By name: the values beside None that change nothing, and the reason or remedy of a refusal."""

_WEIGHTS = "close it and make a new one; a server changes its weights by tpdet reload"
METHODS = {
    "add_lora": "adapters are not supported: merge them into the checkpoint",
    "apply_model": "no code of a script runs in the ranks",
    "beam_search": "there is no beam search: raise n of SamplingParams",
    "collective_rpc": "no code of a script runs in the ranks",
    "dead_error": "every call of a closed one says why it ended",
    "do_log_stats": "a server logs statistics: docs/operations.md",
    "encode": "use embed, classify, score or reward; get_tokenizer().encode(text) gives ids",
    "get_metrics": "a server has metrics: docs/operations.md",
    "errored": "closed says whether it no longer answers",
    "get_model_config": "its settings are in config, the model's in engine.model_config",
    "get_vllm_config": "its settings are in config, the model's in engine.model_config",
    "is_running": "closed says whether it no longer answers",
    "is_stopped": "closed says whether it no longer answers",
    "llm_engine": "LLMEngine is a class of its own; this one's settings are in config",
    "reset_prefix_cache": "no answer depends on the cache: enable_prefix_caching=False is without",
    "set_tokenizer": "give tokenizer=DIR",
    "sleep": _WEIGHTS,
    "start_profile": "use py-spy, or nsys",
    "stop_profile": "use py-spy, or nsys",
    "update_weights": _WEIGHTS,
    "wake_up": _WEIGHTS,
}
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
        idle, remedy = KEYWORDS[name]
        for each in value if isinstance(value, list | tuple) else (value,):
            if each is not None and each not in idle:
                raise RequestError(f"{name} {value!r:.60} is not supported: {remedy}", name)
