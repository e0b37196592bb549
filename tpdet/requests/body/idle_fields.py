"""API fields without an effect here: which values are accepted, why others are refused.

Clients, and wrappers around them, send many fields unasked. A value that asks for nothing
(`store: false`, `tools: []`) is accepted; any other is refused, with what to do instead.
"""

from typing import Any, NamedTuple


class Idle(NamedTuple):
    """The values that ask for nothing (none: only null does), and why others are refused."""

    values: tuple[object, ...]
    reason: str

    def accepts(self, value: object) -> bool:
        """Whether a value asks for nothing; 1 and 1.0 are one number, 1 and true are not."""
        return any(_kind(value) is _kind(one) and value == one for one in self.values)


_NO_TOOLS = "only chats call tools: send messages to /v1/chat/completions"
_OLD_TOOLS = "use tools and tool_choice"
_NO_BEAMS = "there is no beam search: raise n"
_TEXT_ONLY = "text is the only kind of content"
_FORM = "use response_format with a JSON schema, or structured_outputs with a regex or a choice"
_BIAS = "use logit_bias"
_TEMPLATE = "conversations are rendered by the server's chat template alone"
_LEAVE = "leave it out"
_EPHEMERAL = {"type": "ephemeral"}
# A hint of other APIs where a prompt may be cached; clients and proxies leave it in.
CACHE_CONTROL = {
    "cache_control": Idle(
        (_EPHEMERAL, _EPHEMERAL | {"ttl": "5m"}, _EPHEMERAL | {"ttl": "1h"}),
        "the prefix cache needs no hints: leave it out",
    )
}

# What a conversation's rendering may be asked for, also without generating.
CONVERSATION = {
    "chat_template": Idle((), f"{_TEMPLATE}: start it with --chat-template"),
    "documents": Idle(([],), "put their text into a message"),
    "media_io_kwargs": Idle(({},), _TEXT_ONLY),
    "mm_processor_kwargs": Idle(({},), _TEXT_ONLY),
}
GENERATION = (
    CONVERSATION
    | CACHE_CONTROL
    | {
        "allowed_token_ids": Idle(
            (), "use structured_outputs with a choice, or logit_bias for up to 1,024 ids"
        ),
        "audio": Idle((), _TEXT_ONLY),
        "bad_words": Idle(([],), "use logit_bias -100 for the ids that must not come"),
        "best_of": Idle((1,), "choices are not chosen among: use n"),
        "detokenize": Idle((True,), "answers hold text: return_token_ids gives the ids beside it"),
        "ec_transfer_params": Idle(({},), _LEAVE),
        "ebnf": Idle((), _FORM),
        "enable_thinking": Idle(
            (), 'send chat_template_kwargs {"enable_thinking": ...}, if the chat template reads it'
        ),
        "extra_body": Idle(
            ({},), "it is an argument of the openai client: send its fields beside the others"
        ),
        "function_call": Idle(("none", "auto"), _OLD_TOOLS),
        "functions": Idle(([],), _OLD_TOOLS),
        "guided_decoding_backend": Idle(("auto", "guidance"), "there is no other: leave it out"),
        "guided_grammar": Idle((), _FORM),
        "guided_whitespace_pattern": Idle(
            (), 'give the schema "x-guidance": {"whitespace_flexible": true}'
        ),
        "kv_transfer_params": Idle(({},), _LEAVE),
        "length_penalty": Idle((1.0,), _NO_BEAMS),
        "logits_processors": Idle(([],), _BIAS),
        "modalities": Idle((["text"],), _TEXT_ONLY),
        "moderation": Idle((), "nothing is moderated: leave it out"),
        "priority": Idle((0,), "requests are served in the order of their arrival: leave it out"),
        "prompt_cache_options": Idle(({}, {"mode": "implicit"}), "use cache_salt"),
        "prompt_cache_retention": Idle(
            ("in_memory",), "the prefix cache is in memory: leave it out"
        ),
        "prompt_embeds": Idle((), "send text or token ids as prompt"),
        "regex": Idle((), 'use structured_outputs {"regex": ...}'),
        "repetition_detection": Idle((), "use repetition_penalty or stop"),
        "request_id": Idle(
            (), "the server gives each answer an x-request-id of its own: leave it out"
        ),
        "return_mm_kwargs": Idle((True,), _TEXT_ONLY),
        "return_prompt_text": Idle((False,), "use return_token_ids and /detokenize"),
        "return_token_offsets": Idle((False,), "completions have text_offset with logprobs"),
        "routed_experts_prompt_start": Idle((0,), _LEAVE),
        "service_tier": Idle(("auto", "default"), "there is one tier: leave it out"),
        "spaces_between_special_tokens": Idle((True,), "texts are as the tokenizer decodes them"),
        "store": Idle((False,), "answers are not stored: leave it out"),
        "stream_interval": Idle((1,), "each token is sent when it is there: leave it out"),
        "suffix": Idle(("",), "text is not filled in before a suffix: leave it out"),
        "thinking_token_budget": Idle((-1,), "use max_tokens"),
        "truncation_side": Idle(("left",), "truncate_prompt_tokens keeps the last tokens"),
        "use_beam_search": Idle((False,), _NO_BEAMS),
        "verbosity": Idle(("medium",), "say in a message how long the answer should be"),
        "vllm_xargs": Idle(({},), _LEAVE),
        "watermarking": Idle((False,), "text is not marked: leave it out"),
        "web_search_options": Idle((), "nothing is searched: leave it out"),
    }
)
CHAT = GENERATION | {"echo": Idle((False,), "only completions repeat their prompt")}
_OF_CHATS = "only chats have a template: send the text itself as prompt"
COMPLETION = GENERATION | {
    "tools": Idle(([],), _NO_TOOLS),
    "tool_choice": Idle(("none", "auto"), _NO_TOOLS),
    "chat_template_kwargs": Idle(({},), _OF_CHATS),
    "continue_final_message": Idle((False,), _OF_CHATS),
    "include_reasoning": Idle((True,), "completions are not split: only chats have reasoning"),
    "reasoning_effort": Idle((), _OF_CHATS),
}
RESPONSE_FORMAT = {
    "schema": Idle((), 'send {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'),
}
STREAM_OPTIONS = {
    "include_obfuscation": Idle((False,), "events are not padded: leave it out"),
}
TEXT_PART = CACHE_CONTROL | {
    "annotations": Idle(([],), _TEXT_ONLY),
    "logprobs": Idle(([],), "what a message was scored with is no part of it: leave it out"),
}
MESSAGE = CACHE_CONTROL | {
    "annotations": Idle(([],), _TEXT_ONLY),
    "audio": Idle((), _TEXT_ONLY),
    "function_call": Idle((), "write it as one of tool_calls"),
    "refusal": Idle((), "put its text into content"),
}


def add_to_schema(schema: dict[str, Any], fields: dict[str, Idle]) -> None:
    """Publish the values that ask for nothing as properties of a body's JSON schema."""
    for name, idle in sorted(fields.items()):
        if idle.values:
            schema["properties"][name] = {
                "enum": [*idle.values, None],
                "description": f"Taken, without effect. Anything else is refused: {idle.reason}.",
            }


def _kind(value: object) -> type:
    """A value's type; numbers are of one."""
    return float if type(value) is int else type(value)
