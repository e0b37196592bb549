"""Many requests at a time, one of which is given up."""

import asyncio
import sys
import uuid

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind


async def ask(engine, prompt, number):
    params = SamplingParams(max_tokens=4 + number, temperature=0, ignore_eos=True)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    outputs = [o async for o in engine.generate(prompt, params, uuid.uuid4().hex)]
    assert len(outputs) == 1 and outputs[0].finished
    return len(outputs[0].outputs[0].token_ids)


async def give_up(engine):
    reason = None
    async for output in engine.generate("A list", SamplingParams(max_tokens=900), "long"):
        await engine.abort(["long", "unknown"])
        reason = output.outputs[0].finish_reason
    return reason


async def main():
    args = AsyncEngineArgs(model=sys.argv[1], max_num_seqs=4, disable_log_stats=True)
    engine = AsyncLLMEngine.from_engine_args(args)
    asked = [ask(engine, f"Line {number}", number) for number in range(6)]
    *lengths, reason = await asyncio.gather(*asked, give_up(engine))
    assert lengths == [4, 5, 6, 7, 8, 9]
    print(lengths, reason)
    engine.shutdown()


asyncio.run(main())
