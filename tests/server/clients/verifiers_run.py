"""The training client of verifiers and renderers, unmodified, against the server at a URL.

    python verifiers_run.py URL MODEL

Several conversations of three turns each at once, as a trainer's rollouts: the client renders the
messages, keeps the ids that it has, and reads ids and log-probabilities. Prints one JSON line.
It runs in an environment of its own: these packages want other versions than the tests have.
"""

import asyncio
import hashlib
import inspect
import json
import sys
from pathlib import Path

import renderers.client
import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from verifiers.v1.clients import train
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.types import SamplingConfig

CONVERSATIONS, TOKENS, END = 8, 16, 257
QUESTIONS = ["What is a tree?", "And a leaf?", "Why?"]


async def converse(client: train.TrainClient, model: str, index: int) -> list[dict]:
    """The turns of one conversation; each continues the ids of the one before."""
    task = vf.TraceTask(type="task", data=vf.TaskData(prompt="talk"))
    trace = vf.Trace(task=task, agent=vf.AgentInfo(config=vf.AgentConfig()))
    messages, turns = [], []
    sampling = SamplingConfig(
        temperature=0.8, max_tokens=TOKENS, seed=index, logit_bias={str(END): 6.0}, cache_salt="v1"
    )
    for question in QUESTIONS:
        messages.append({"role": "user", "content": f"{question} ({index})"})
        body = {"model": "tiny", "messages": messages}
        request = ChatDialect().parse_request(body)
        turn = prepare_turn(trace, request.messages, request.tools)
        answer = await client.get_response(ChatDialect(), body, sampling, f"s{index}", turn)
        turn.commit(answer)
        messages.append(answer.raw["choices"][0]["message"])
        tokens = answer.tokens
        turns.append(
            {
                "prompt": tokens.prompt_ids,
                "completion": tokens.completion_ids,
                "logprobs": tokens.completion_logprobs,
                "bridged": tokens.bridged,
                "reason": answer.finish_reason,
            }
        )
    (branch,) = trace.branches
    turns[-1]["branch"] = branch.token_ids
    return turns


async def main(url: str, model: str) -> None:
    """Talk, twice, and print what was read."""
    config = vf.TrainClientConfig(
        base_url=f"{url}/v1",
        renderer=Qwen3RendererConfig(enable_thinking=False),
        renderer_model_name=model,
    )
    runs = []
    for _ in range(2):
        client = train.TrainClient(config)
        runs.append(
            await asyncio.gather(*(converse(client, model, i) for i in range(CONVERSATIONS)))
        )
        await client.close()
    files = [inspect.getfile(module) for module in (train, renderers.client)]
    hashes = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
    print(json.dumps({"files": hashes, "runs": runs}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
