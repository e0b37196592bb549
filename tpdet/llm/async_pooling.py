"""`AsyncLLM.embed` and its like: as those of `LLM`, awaited, beside other requests."""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from tpdet.llm.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    Params,
    PooledPlan,
    PoolingOutput,
    PoolingPlans,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from tpdet.llm.results import PooledResult, ResultWriter
from tpdet.llm.stream import PooledStream
from tpdet.llm.vllm_keywords import refuse_what_asks
from tpdet.requests.pooling_params import PoolingParams

if TYPE_CHECKING:
    from tpdet.llm.engine_thread import EngineThread


class AsyncPoolingCalls(PoolingPlans):
    """The calls of an `AsyncLLM` whose model pools."""

    _thread: "EngineThread"
    _numbers: "count[int]"
    _writer: ResultWriter

    def _refuse_asking(self) -> None: ...

    async def embed(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: Params = None,
        prompt_name: str | None = None,
        **of_vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of prompts. Arguments and errors as of `LLM.embed`."""
        refuse_what_asks("embed", of_vllm, ("pooling_params", "prompt_name"))
        self._refuse_asking()
        options = truncate_prompt_tokens, pooling_params, prompt_name
        return await self._pooled(self._embedding(prompts, *options))

    async def classify(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: Params = None,
        **of_vllm: Any,
    ) -> list[ClassificationRequestOutput]:
        """The labels' probabilities of prompts. Arguments and errors as of `LLM.embed`."""
        refuse_what_asks("classify", of_vllm, ("pooling_params",))
        self._refuse_asking()
        plan = self._classification(prompts, truncate_prompt_tokens, pooling_params)
        return await self._pooled(plan)

    async def reward(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: Params = None,
        **of_vllm: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The score head's own values of prompts. Arguments and errors as of `LLM.reward`."""
        refuse_what_asks("reward", of_vllm, ("pooling_params",))
        self._refuse_asking()
        plan = self._rewarding(prompts, truncate_prompt_tokens, pooling_params)
        return await self._pooled(plan)

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        **of_vllm: Any,
    ) -> list[ScoringRequestOutput]:
        """A score of each pair of texts. Arguments and errors as of `LLM.score`."""
        refuse_what_asks("score", of_vllm, ("pooling_params", "instruction"))
        self._refuse_asking()
        options = truncate_prompt_tokens, pooling_params, instruction
        return await self._pooled(self._scoring(data_1, data_2, *options))

    async def _pooled(self, plan: PooledPlan) -> list[Any]:
        """The outputs of a plan; the first error ends its other requests."""
        name = f"async-{next(self._numbers)}"
        requests = await asyncio.to_thread(self._pooled_requests, plan, name)
        streams = [PooledStream(request, self._writer, self._thread.drop) for request in requests]
        for stream in streams:
            self._thread.submit(stream)
        results: list[PooledResult] = []
        try:
            for stream in streams:
                results.append(await stream.result())
        finally:
            for stream in streams:
                stream.leave()
        return await asyncio.to_thread(plan.shape, results)
