"""A client of the tests of tapes: the unmodified anthropic package, its address by variables.

It asks for the weather, says what the tool found, and prints what it was told, as JSON.
"""

import json

import anthropic

TOOL = {"name": "weather", "input_schema": {"type": "object"}}
CALL = '\ue003\n{"name": "weather", "arguments": {"city": "Bonn"}}\n\ue004\ue002'


def main() -> None:
    client = anthropic.Anthropic(max_retries=0, timeout=60)
    talk = [{"role": "user", "content": "Is it raining?"}]
    fields = {"model": "demo", "max_tokens": 5000, "tools": [TOOL], "system": "Be brief."}
    scripted = {"extra_body": {"cache_salt": f"text=Let me see.\n\n{CALL}"}}
    with client.messages.stream(messages=talk, **fields, **scripted) as stream:
        asked = stream.get_final_message()
    talk.append({"role": "assistant", "content": asked.to_param()["content"]})
    (use,) = [block for block in asked.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "It rains."}
    talk.append({"role": "user", "content": [result]})
    counted = client.messages.count_tokens(
        messages=talk, **{k: v for k, v in fields.items() if k != "max_tokens"}
    )
    fields["max_tokens"] = 7
    told = client.messages.create(messages=talk, extra_body={"seed": 5}, **fields)
    assert counted.input_tokens == told.usage.input_tokens
    print(json.dumps([asked.content[0].text, use.input, told.content[0].text]))


if __name__ == "__main__":
    main()
