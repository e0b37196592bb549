"""Outputs as JSON lines, and settings as a dictionary."""

import json
import sys
from dataclasses import asdict

from vllm import LLM, EngineArgs, SamplingParams

args = EngineArgs(model=sys.argv[1], max_num_seqs=4, trust_remote_code=False)
llm = LLM(**asdict(args))
params = SamplingParams(temperature=0.6, logprobs=1, max_tokens=3, seed=9)
for output in llm.generate(["A list", [5, 6, 7]], params):
    line = json.dumps(asdict(output))
    read = json.loads(line)
    assert read["outputs"][0]["text"] == output.outputs[0].text
    assert read["prompt_token_ids"] == list(output.prompt_token_ids)
    print(line)
