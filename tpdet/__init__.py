"""tpdet: tensor-parallel, bitwise-deterministic inference for large language models.

Nothing heavy is imported here: public names are loaded on first use, so the scheduler, the page
tables and the command line start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpdet.arguments.sampling_params import SamplingParams
    from tpdet.arguments.structured_outputs import StructuredOutputsParams
    from tpdet.llm import LLM, AsyncLLM, CompletionOutput, Logprob, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams",
    "StructuredOutputsParams", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "SamplingParams":
        return import_module("tpdet.arguments.sampling_params").SamplingParams
    if name == "StructuredOutputsParams":
        return import_module("tpdet.arguments.structured_outputs").StructuredOutputsParams
    if name in __all__:
        return getattr(import_module("tpdet.llm"), name)
    raise AttributeError(f"module 'tpdet' has no attribute {name!r}")
