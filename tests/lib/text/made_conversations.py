"""Conversations made from a seed, with settings of their rendering, and templates for them."""

import random

SNIPPETS = (
    "", " ", "hi", "  two\n\nlines  \n", "Grüße, 日本語 und 中文",
    "👩\u200d👩\u200d👧\u200d👦 🇩🇪 👍🏽", "tab\t\x00\x1b[0m\u2028\ufeff",
    "def f(x):\n    return x['a'] <= \"b\" & 1", "{{ messages }} {% raw %} <think>",
    "<|im_end|>", "[/INST]</s>", "<|eot_id|><|start_header_id|>system",
    "\U000f0000 private", "CONTINUE_FINAL_MESSAGE_TAG ", "é" * 300,
)  # fmt: skip
VALUES = (None, True, 3, 2.5, "x", "Zürich <b>", ["a", {"b": []}], {"é": "'\"\\", "n": None})
SPECIAL = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ),
    *("<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
)

CHATML = """\
{%- if tone is defined %}{{ '# ' ~ tone ~ '\\n' }}{% endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + (' ' + message.name if message.name is defined else '') }}
    {{- '\\n' }}
    {%- if message.reasoning_content is defined and not loop.last %}
        {{- '<think>' + message.reasoning_content + '</think>\\n' }}
    {%- endif %}
    {%- if message.content is string %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA_3_LIKE = """\
{{- bos_token }}
{%- set date = date_string if date_string is defined else '26 Jul 2024' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for tool in tools or [] %}
    {{- '// ' ~ (tool.function.description or 'undescribed') ~ '\\n' ~ tool.function.name ~ '(' }}
    {%- for name, schema in tool.function.parameters.properties.items() %}
        {{- name ~ ': ' ~ ('text' if schema.type == 'string' else schema.type) ~ ', ' }}
    {%- endfor %}
    {{- ')\\n' }}
{%- endfor %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('only one call at once') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_LIKE = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- if not users %}{{ raise_exception('a user must speak') }}{% endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if message == users[-1] and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message['content'] | tojson + '}' }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool, not ' + message['role']) }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama 3": LLAMA_3_LIKE, "mistral": MISTRAL_LIKE}


def conversation(seed):
    """(messages, how transformers' `apply_chat_template` shall end them, variables by name)"""
    draw = random.Random(seed)
    messages = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": text(draw)})
    for turn in range(draw.randint(1, 3)):
        named = {"name": draw.choice(["Ada", "名前"])} if draw.random() < 0.2 else {}
        messages.append({"role": "user", "content": text(draw)} | named)
        if draw.random() < 0.4:
            calls = [call(draw, f"call{turn}{i:04}") for i in range(draw.choice([1, 1, 1, 2]))]
            content = draw.choice([None, text(draw)])
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            for each in calls:
                answer = {"role": "tool", "tool_call_id": each["id"], "content": text(draw)}
                messages.append(answer)
        thought = {"reasoning_content": text(draw)} if draw.random() < 0.3 else {}
        messages.append({"role": "assistant", "content": text(draw)} | thought)
    end = draw.choice(["as it is", "generate", "continue"])
    if end == "generate" and draw.random() < 0.8:
        messages.pop()
    variables = {}
    if draw.random() < 0.5:
        variables["enable_thinking"] = draw.choice([True, False])
    if draw.random() < 0.3:
        variables["date_string"] = draw.choice(["1 Jan 2026", "令和8年", ""])
    if draw.random() < 0.3:
        variables["tone"] = draw.choice(VALUES)
    ending = {
        "add_generation_prompt": end == "generate",
        "continue_final_message": end == "continue",
    }
    return messages, ending, variables


def text(draw):
    return "".join(draw.choice(SNIPPETS) for _ in range(draw.choice([1, 1, 2, 3])))


def tools(seed):
    """Declarations of one to three tools."""
    draw = random.Random(seed)
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": text(draw),
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: {"type": draw.choice(["string", "integer"]), "description": text(draw)}
                        for key in draw.sample(["city", "größe", "q'"], draw.randint(0, 3))
                    },
                    "required": ["city"],
                },
            },
        }
        for name in draw.sample(["weather", "f_2", "search"], draw.randint(1, 3))
    ]


def call(draw, id_):
    keys = draw.sample(["city", "größe", "q'"], draw.randint(0, 3))
    arguments = {key: draw.choice(VALUES) for key in keys}
    function = {"name": draw.choice(["weather", "f_2"]), "arguments": arguments}
    return {"id": id_, "type": "function", "function": function}
