"""Text as it comes."""

import asyncio
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    params = SamplingParams(
        max_tokens=12, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA
    )
    text = ""
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=params
    ):
        for completion in output.outputs:
            text += completion.text
            print(completion.text, end="", flush=True)
        if output.finished:
            print()
            break
    return text


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], enforce_eager=True))
    try:
        one = await stream(engine, "The for statement", "stream-1")
        two = await stream(engine, "The for statement", "stream-2")
        assert one == two
        await engine.check_health()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
