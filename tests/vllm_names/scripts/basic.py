"""A list of prompts, sampled."""

import sys

from vllm import LLM, SamplingParams

PROMPTS = ["The for statement", "A list", "Names in a class", "The import"]


def main():
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    llm = LLM(model=sys.argv[1], num_gpu_blocks_override=None)
    for output in llm.generate(PROMPTS, params):
        print(f"Prompt: {output.prompt!r}, generated: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
