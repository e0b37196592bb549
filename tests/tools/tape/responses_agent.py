"""A client of the tests of tapes: the unmodified openai package, which takes Responses.

It asks for the weather, says what the tool found, and prints what it was told, as JSON.
"""

import json

import openai

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '\ue003\n{"name": "weather", "arguments": {"city": "Bonn"}}\n\ue004\ue002'


def main() -> None:
    client = openai.OpenAI(max_retries=0, timeout=60)
    talk = [{"role": "user", "content": "Is it raining?"}]
    fields = {"model": "demo", "max_output_tokens": 5000, "tools": [TOOL]}
    fields["instructions"] = "Be brief."
    scripted = {"extra_body": {"cache_salt": f"text=Let me see.\n\n{CALL}"}}
    with client.responses.stream(input=talk, **fields, **scripted) as stream:
        asked = stream.get_final_response()
    (call,) = [item for item in asked.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    talk += [*asked.output, result]
    fields["max_output_tokens"] = 7
    told = client.responses.create(input=talk, extra_body={"seed": 5}, **fields)
    print(json.dumps([asked.output_text, json.loads(call.arguments), told.output_text]))


if __name__ == "__main__":
    main()
