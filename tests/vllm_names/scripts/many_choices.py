"""Parameters for each prompt, and several choices of one, the best by log-probability."""

import sys

from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], tensor_parallel_size=1, disable_log_stats=True)
each = [
    SamplingParams(temperature=0, max_tokens=3),
    SamplingParams(n=3, temperature=0.9, top_p=0.9, seed=11, max_tokens=6, logprobs=0),
    SamplingParams(temperature=0.7, top_k=5, presence_penalty=0.2, stop=["\n\n"], min_tokens=1),
]
outputs = llm.generate(["A list", "The for statement", "Names"], each)
assert [len(output.outputs) for output in outputs] == [1, 3, 1]
best = max(outputs[1].outputs, key=lambda choice: choice.cumulative_logprob)
assert all(output.finished for output in outputs)
print(best.index, repr(best.text), best.cumulative_logprob)
