"""The offline API: a model in this process, or in every rank of a torchrun job. docs/offline.md."""

from tpdet.llm.async_llm import AsyncLLM
from tpdet.llm.llm import LLM
from tpdet.llm.llm_engine import LLMEngine
from tpdet.llm.results import CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "LLMEngine", "Logprob", "RequestOutput"]
