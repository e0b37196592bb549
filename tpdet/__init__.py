"""tpdet: tensor-parallel, bitwise-deterministic inference for large language models.

Nothing heavy is imported here: `LLM` and `SamplingParams` load on first use, so the scheduler,
the page tables and the command line start without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpdet.llm import LLM
    from tpdet.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tpdet.llm import LLM

        return LLM
    if name == "SamplingParams":
        from tpdet.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'tpdet' has no attribute {name!r}")
