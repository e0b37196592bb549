"""Tensor parallelism, in a script without a guard."""

import sys

from vllm import LLM, SamplingParams

llm = LLM(
    model=sys.argv[1],
    tensor_parallel_size=2,
    distributed_executor_backend="mp",
    pipeline_parallel_size=1,
)
outputs = llm.generate(["The for statement", "A list"], SamplingParams(seed=5, max_tokens=6))
for output in outputs:
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
