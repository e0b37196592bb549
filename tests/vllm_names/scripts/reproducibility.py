"""The same seed gives the same text, alone and in a batch."""

import random
import sys

from vllm import LLM, SamplingParams

SEED = 42
random.seed(SEED)
llm = LLM(model=sys.argv[1], seed=SEED)
params = SamplingParams(temperature=0.8, top_p=0.95, seed=SEED, max_tokens=10)
alone = llm.generate("The for statement", params)[0].outputs[0].text
order = ["A list", "Names", "The for statement", "The import"]
random.shuffle(order)
for output in llm.generate(order, params):
    if output.prompt == "The for statement":
        assert output.outputs[0].text == alone
print(repr(alone), random.randint(0, 9))
