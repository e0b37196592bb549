"""Every limit of the HTTP surface in one place; `--print-limits` prints `all_limits()`.

`SamplingParams` declares the ranges of its own fields, since the offline API has them too; they are
only listed here.
"""

import json

from tpdet.grammar import trial
from tpdet.requests import field_ranges, tools
from tpdet.requests.sampling_params import RANGES, ROW_PARAMETERS

MAX_BODY_BYTES = 10 << 20
MAX_HELD_BYTES = 128 << 20  # of all requests together, until they are worked on
MAX_JSON_DEPTH = 32
# Of --batch-dir: a file and its requests, all files, batches that are worked on.
MAX_FILE_BYTES = 200 << 20
MAX_FILES = 10_000
MAX_BATCH_REQUESTS = 50_000
MAX_OPEN_BATCHES = 64
# What requests of batches take of the engine together, at most; and half of what it has.
MAX_BATCH_SEQUENCES = 64
MAX_BATCH_PROMPT_TOKENS = 64 << 10
MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 << 10
MAX_URL_BYTES = 8 << 10
MAX_ERROR_BYTES = 4 << 10
MAX_BATCH_PROMPTS = 1024
MAX_POOLED_INPUTS = 2048
MAX_USER_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_MODEL_CHARACTERS = 1024
MAX_NAME_CHARACTERS = 256
MAX_DESCRIPTION_CHARACTERS = 4096
MAX_REPEATED_CHARACTERS = 1 << 20  # of one field that the answer to its request repeats, as JSON
MAX_PIPELINED = 16
MAX_WAITING_SCHEMAS = 32
MAX_WAITING_LARGE_BODIES = 8
MAX_MESSAGE_BYTES = 256 << 20
# Of one request: tokens that its answer shows, times the alternatives beside each. 64 prompts of
# 2,048 tokens with one alternative are an eighth of it.
MAX_LOGPROBS_IN_ANSWER = 1 << 20
MAX_ROUTED_BYTES = 64 << 20  # of one choice, and of one message of the engine but for one choice
MAX_PART_LOGPROBS = 64 << 10  # in one message of the engine

HEADER_TIMEOUT = 10.0
BODY_TIMEOUT = 30.0
FILE_TIMEOUT = 600.0
BATCH_SECONDS = 24 * 3600
DRAIN_BODY_TIMEOUT = 1.0
KEEP_ALIVE_TIMEOUT = 30.0
SLOW_READER_TIMEOUT = 30.0
RETRY_AFTER_SECONDS = 1
# Larger bodies are worked on in a thread, and past the second size in a process of their own: a
# chat of 10 MB takes 20 s in all, and holds Python's interpreter for 1.5 s at a time.
THREAD_BODY_BYTES = 16 << 10
LARGE_BODY_BYTES = 256 << 10
BODY_CPU_SECONDS = 120
BODY_MEMORY_BYTES = 8 << 30
# A small conversation whose template does more than may be done in the HTTP process.
TEMPLATE_CPU_SECONDS = 5
STATISTICS_SECONDS = 10.0


_NAMED = ("temperature", "repetition_penalty")  # parameters of rows that are listed by themselves


def share_of(limit: int, processes: int) -> int:
    """One HTTP process's part of a limit of the server; at least 1."""
    return max(1, limit // processes)


def all_limits() -> dict[str, object]:
    """Name to value of every limit; sizes in bytes, times in seconds, ranges as [low, high]."""
    return {
        "body_bytes": MAX_BODY_BYTES,
        "held_request_bytes": MAX_HELD_BYTES,
        "file_bytes": MAX_FILE_BYTES,
        "files": MAX_FILES,
        "batch_requests": MAX_BATCH_REQUESTS,
        "batches_open": MAX_OPEN_BATCHES,
        "batch_sequences": MAX_BATCH_SEQUENCES,
        "batch_prompt_tokens": MAX_BATCH_PROMPT_TOKENS,
        "json_depth": MAX_JSON_DEPTH,
        "headers": MAX_HEADERS,
        "header_bytes": MAX_HEADER_BYTES,
        "url_bytes": MAX_URL_BYTES,
        "error_bytes": MAX_ERROR_BYTES,
        "batch_prompts": MAX_BATCH_PROMPTS,
        "pooled_inputs": MAX_POOLED_INPUTS,
        "n": RANGES["n"].ends,
        "logprobs": RANGES["logprobs"].ends,
        "top_logprobs": RANGES["logprobs"].ends,
        "prompt_logprobs": RANGES["prompt_logprobs"].ends,
        "logprobs_in_answer": MAX_LOGPROBS_IN_ANSWER,
        "stop_strings": field_ranges.MAX_STOP_STRINGS,
        "stop_string_bytes": [1, field_ranges.MAX_STOP_BYTES],
        "logit_bias_ids": field_ranges.MAX_LOGIT_BIAS_IDS,
        "logit_bias": field_ranges.LOGIT_BIAS.ends,
        "temperature": RANGES["temperature"].ends,
        "smallest_temperature_above_zero": field_ranges.MIN_TEMPERATURE,
        **{name: RANGES[name].ends for name in ROW_PARAMETERS if name not in _NAMED},
        "repetition_penalty_above": RANGES["repetition_penalty"].low,
        "seed": RANGES["seed"].ends,
        "schema_bytes": field_ranges.MAX_SCHEMA_BYTES,
        "tools": tools.MAX_TOOLS,
        "tool_bytes": field_ranges.MAX_TOOL_BYTES,
        "schema_cpu_seconds": trial.CPU_SECONDS,
        "schemas_waiting": MAX_WAITING_SCHEMAS,
        "schema_description_characters": MAX_DESCRIPTION_CHARACTERS,
        "name_characters": MAX_NAME_CHARACTERS,
        "model_characters": MAX_MODEL_CHARACTERS,
        "repeated_characters": MAX_REPEATED_CHARACTERS,
        "user_bytes": MAX_USER_BYTES,
        "cache_salt_bytes": MAX_CACHE_SALT_BYTES,
        "large_body_bytes": LARGE_BODY_BYTES,
        "large_bodies_waiting": MAX_WAITING_LARGE_BODIES,
        "large_body_cpu_seconds": BODY_CPU_SECONDS,
        "large_body_memory_bytes": BODY_MEMORY_BYTES,
        "chat_template_cpu_seconds": TEMPLATE_CPU_SECONDS,
        "pipelined_requests": MAX_PIPELINED,
        "header_timeout_seconds": HEADER_TIMEOUT,
        "body_timeout_seconds": BODY_TIMEOUT,
        "file_timeout_seconds": FILE_TIMEOUT,
        "batch_seconds": BATCH_SECONDS,
        "keep_alive_timeout_seconds": KEEP_ALIVE_TIMEOUT,
        "slow_reader_timeout_seconds": SLOW_READER_TIMEOUT,
        "discarded_body_seconds": DRAIN_BODY_TIMEOUT,
        "retry_after_seconds": RETRY_AFTER_SECONDS,
    }


def limits_json() -> str:
    """`all_limits()` as one line of JSON."""
    return json.dumps(all_limits())
