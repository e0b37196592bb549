"""Requests that are added while others run."""

import sys

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils import FlexibleArgumentParser


def prompts():
    return [
        ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("The meaning of", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]


def process(engine: LLMEngine, waiting) -> list[RequestOutput]:
    number, done = 0, []
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
            number += 1
        for output in engine.step():
            if output.finished:
                done.append(output)
    return done


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="a loop"))
    args = parser.parse_args(["--model", sys.argv[1], "--enforce-eager"])
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    done = process(engine, prompts())
    assert {output.request_id for output in done} == {"0", "1", "2"}
    for output in sorted(done, key=lambda output: output.request_id):
        print(output.request_id, [choice.text for choice in output.outputs])
    engine.shutdown()
