"""Prompts with one beginning, with and without the cache of prefixes."""

import sys

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PREFIX = "You are an expert school principal. " * 40
PROMPTS = [PREFIX + end for end in ("Write a plan.", "Hold a meeting.", "Name three rules.")]


def main():
    params = SamplingParams(temperature=0.0, max_tokens=4)
    found = []
    for cached in (False, True):
        llm = LLM(model=sys.argv[1], enable_prefix_caching=cached, gpu_memory_utilization=0.4)
        if cached:
            llm.generate(PROMPTS[0], params)
        found.append([output.outputs[0].text for output in llm.generate(PROMPTS, params)])
        del llm
        cleanup_dist_env_and_memory()
    assert found[0] == found[1]
    print(found)


if __name__ == "__main__":
    main()
