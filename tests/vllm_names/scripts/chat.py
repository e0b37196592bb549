"""A conversation, and many at a time; parameters are changed between the calls."""

import sys

from vllm import LLM, SamplingParams

TALK = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What can I do?"},
    {"role": "user", "content": [{"type": "text", "text": "Explain the for statement."}]},
]

llm = LLM(model=sys.argv[1], enforce_eager=True, trust_remote_code=True, block_size=16)
params = SamplingParams(temperature=0.5)
params.max_tokens = 12
(first,) = llm.chat(TALK, params, use_tqdm=False, chat_template_content_format="auto")
params.seed, params.max_tokens = 3, 6
many = llm.chat([TALK] * 3, sampling_params=params, use_tqdm=True, lora_request=None)
assert len(first.outputs[0].token_ids) <= 12
assert len({tuple(output.outputs[0].token_ids) for output in many}) == 1
print(first.outputs[0].text, many[0].outputs[0].text)
template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
print(llm.chat(TALK[:1], params, chat_template=template)[0].outputs[0].text)
