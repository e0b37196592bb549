"""Log-probabilities of what is sampled, and of the prompt."""

import math
import sys

from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], max_num_seqs=8, gpu_memory_utilization=0.8, swap_space=4)
params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
(output,) = llm.generate("The for statement", params)
assert output.prompt_logprobs[0] is None
for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
    print(token, position[token].logprob, position[token].rank, position[token].decoded_token)
choice, total = output.outputs[0], 0.0
for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
    best = max(position.values(), key=lambda entry: entry.logprob)
    assert position[token] == best and best.rank == 1
    total += position[token].logprob
assert math.isclose(total, choice.cumulative_logprob, rel_tol=1e-6)
print(choice.text, choice.cumulative_logprob, choice.finish_reason, choice.stop_reason)
