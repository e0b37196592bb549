"""The tokenizer as training code uses it: rollouts, masks and rewards."""

import sys

from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1])
tokenizer = llm.get_tokenizer()
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
talks = [[{"role": "user", "content": text}] for text in ("Hello", "Count to three.")]
texts = [
    tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    for talk in talks
]
prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
params = SamplingParams(n=2, temperature=1.0, logprobs=0, seed=1, max_tokens=8)
rollouts = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
answers = [list(choice.token_ids) for output in rollouts for choice in output.outputs]
decoded = tokenizer.batch_decode(answers, skip_special_tokens=True)
assert decoded == [choice.text for output in rollouts for choice in output.outputs]
batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
assert batch["input_ids"].shape == batch["attention_mask"].shape
chat = llm.chat(talks, params)
assert [output.prompt_token_ids for output in chat] == [tuple(ids) for ids in prompts]
print(len(tokenizer), tokenizer.eos_token_id, tokenizer.all_special_ids, decoded)
