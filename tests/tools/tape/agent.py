"""A client of the tests of tapes: the unmodified openai package, its address and key by variables.

agent.py [WORD ...]: each word is said in the conversation, in order, one that begins with "Result"
as a tool's; it prints what it was told.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

MODEL = os.environ.get("TAPE_MODEL", "demo")


def main(words: list[str]) -> None:
    client = openai.OpenAI(max_retries=0, timeout=60)
    said: list[dict[str, str]] = []
    for place, word in enumerate(words):
        result = {"role": "tool", "tool_call_id": "call"}
        by = result if word.startswith("Result") else {"role": "user"}
        said.append({**by, "content": word})
        settings = {"model": MODEL, "messages": said, "max_tokens": 6, "temperature": 0.8}
        if place % 2:
            stream = client.chat.completions.create(
                **settings, stream=True, stream_options={"include_usage": True}, seed=place
            )
            pieces = [c.delta.content or "" for chunk in stream for c in chunk.choices]
            text = "".join(pieces)
        else:
            text = client.chat.completions.create(**settings).choices[0].message.content or ""
        said.append({"role": "assistant", "content": text})
    try:
        client.completions.create(model=MODEL, prompt="x", max_tokens=2, temperature=9)
    except openai.BadRequestError as error:
        said.append({"role": "error", "content": str(error.status_code)})

    def several(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=f"Count {seed}", max_tokens=4, n=2, seed=seed
        )
        return [choice.text for choice in answer.choices]

    with ThreadPoolExecutor(3) as pool:
        said += [
            {"role": "n", "content": text}
            for texts in pool.map(several, range(3))
            for text in texts
        ]
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])
