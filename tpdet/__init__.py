"""tpdet: tensor-parallel, bitwise-deterministic inference for large language models.

Nothing heavy is imported here: public names are loaded on first use, so the scheduler, the page
tables and the command line start without torch. Names of vLLM's that are not here, and its modules,
say what replaces them (`vllm_names`).
"""

from typing import TYPE_CHECKING, Any

from tpdet.vllm_names import finder as _finder

if TYPE_CHECKING:
    from tpdet.llm import LLM, AsyncLLM, CompletionOutput, LLMEngine, Logprob, RequestOutput
    from tpdet.llm.pooling import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from tpdet.llm.prompts import TextPrompt, TokensPrompt
    from tpdet.requests.output_kind import RequestOutputKind
    from tpdet.requests.pooling_params import PoolingParams
    from tpdet.requests.sampling_params import SamplingParams
    from tpdet.requests.structured_outputs import StructuredOutputsParams
    from tpdet.vllm_names.engine_args import AsyncEngineArgs, EngineArgs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]
_finder.install()


def __getattr__(name: str) -> Any:
    return _finder.find_name("tpdet", __all__, name)


def __dir__() -> list[str]:
    return __all__
