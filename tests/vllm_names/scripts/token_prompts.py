"""Prompts as text and as ids, in every form."""

import sys

from vllm import LLM, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt

llm = LLM(model=sys.argv[1], dtype="float32", seed=None, quantization=None)
params = SamplingParams(temperature=0, max_tokens=5)
ids = llm.get_tokenizer().encode("The for statement")
outputs = llm.generate(
    [
        "The for statement",
        TextPrompt(prompt="The for statement"),
        TokensPrompt(prompt_token_ids=ids),
        {"prompt_token_ids": ids},
    ],
    sampling_params=params,
)
outputs += llm.generate(prompt_token_ids=[ids], sampling_params=params, use_tqdm=False)
outputs += llm.generate(prompts={"prompt": "The for statement"}, sampling_params=params)
assert len(outputs) == 6 and len({output.outputs[0].token_ids for output in outputs}) == 1
print(outputs[0].outputs[0].text)
