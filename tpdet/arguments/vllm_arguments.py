"""vLLM's spellings that tpdet accepts: short dtypes, sizes such as 2k, arguments without an effect.

The command line, the environment, configuration files and `LLM` share them.
"""

import re
from dataclasses import dataclass

from tpdet.errors import UsageError

DTYPES = {
    "half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
}  # fmt: skip
"""Short names of dtypes."""

REASONING_PARSERS = {
    "qwen3": "think", "deepseek_r1": "think", "glm45": "think", "seed_oss": "think",
    "openai_gptoss": "harmony", "mistral": "text_think", "olmo3": "text_think",
    "deepseek-r1": "think", "qwen3-thinking": "think", "gpt-oss": "harmony",
}  # fmt: skip
"""vLLM's and SGLang's names of reasoning parsers."""

_SUFFIXES = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


def parse_size(text: str) -> int:
    """A whole number, or one with a suffix as vLLM has them: k, m, g, t are powers of 1000, of
    which there may be fractions (1.5k); K, M, G, T are powers of 1024. Raises ValueError.
    """
    found = re.fullmatch(r"([0-9]+)(\.[0-9]+)?([kmgtKMGT])", text.strip(), re.ASCII)
    if found is None:
        if re.fullmatch(r"[+-]?[0-9]+", text.strip(), re.ASCII):
            return int(text)
        raise ValueError(f"{text!r} is not a whole number, nor one with a suffix such as 2k or 8K")
    whole, fraction, suffix = found.groups()
    if fraction is None:
        return int(whole) * _SUFFIXES[suffix]
    if suffix.isupper():
        raise ValueError(f"{text!r} has a fraction of a power of 1024: use {text.strip().lower()}")
    value, rest = divmod(int(whole + fraction[1:]) * _SUFFIXES[suffix], 10 ** len(fraction[1:]))
    if rest:
        raise ValueError(f"{text!r} is not a whole number")
    return value


@dataclass(frozen=True)
class Habit:
    """An argument of vLLM that this engine does not have. `why` is the sentence for the log, or
    the reason and remedy of a refusal.

    values: the texts that ask for what is done here anyway, in lower case; None: any value;
    empty: none, it is always refused. A switch that is given counts as "true", one that is turned
    off as "false".
    """

    why: str
    values: frozenset[str] | None
    switch: bool = False


def _always(why: str) -> Habit:
    return Habit(why, frozenset({"true"}), switch=True)


def _never(why: str) -> Habit:
    return Habit(why, frozenset({"false"}), switch=True)


def _either(why: str) -> Habit:
    return Habit(why, None, switch=True)


def _only(why: str, *values: str) -> Habit:
    return Habit(why, frozenset(values))


def _any(why: str) -> Habit:
    return Habit(why, None)


_NO_ORIGINS = "pages of other origins are not let in (CORS): put a proxy in front that adds headers"

HABITS = {
    "enable-chunked-prefill": _always("long prompts are always read in pieces"),
    "trust-remote-code": _either("no code of a model is ever run"),
    "disable-log-requests": _always("what requests hold is never logged"),
    "enable-log-requests": _never("what requests hold is never logged"),
    "swap-space": _any("no KV cache is swapped out: preempted requests are computed again"),
    "generation-config": _only(
        "sampling defaults of generation_config.json are not read, its ids that end text are",
        "vllm",
    ),
    "async-scheduling": _always("steps are always planned ahead"),
    "use-v2-block-manager": _always("there is one page manager"),
    "max-seq-len-to-capture": _any("CUDA graphs hold sequences of any length"),
    "preemption-mode": _only("preempted requests are computed again", "recompute"),
    "scheduling-policy": _only("requests are taken in the order they came", "fcfs"),
    "tokenizer-mode": _only("there is one way of reading a tokenizer", "auto"),
    "config-format": _only("models are Hugging Face directories", "auto", "hf"),
    "block-size": _any("a page of KV cache holds 256 tokens"),
    "num-gpu-blocks-override": _only("--kv-pages says how many pages of 256 tokens there are"),
    "max-logprobs": _only("a request may ask for 100 alternatives a token", "20", "100"),
    "cpu-offload-gb": _only("weights stay on the device", "0", "0.0"),
    "runner": _only("--task says what a model answers", "auto", "generate"),
    "response-role": _only("answers have the role assistant", "assistant"),
    "distributed-executor-backend": _only(
        "ranks are processes; the launcher starts those of several hosts",
        "mp",
        "external_launcher",
    ),
    "hf-overrides": _only("config.json is read as it is", "{}"),
    "override-generation-config": _only("each request says how it is sampled", "{}"),
    "limit-mm-per-prompt": _only("models read text", "{}"),
    "model-impl": _only("models run on tpdet's own layers", "auto", "vllm"),
    "tokenizer-revision": _only("--revision holds for the tokenizer too"),
    "compilation-config": _any("kernels are compiled ahead: see --compile-ahead"),
    "optimization-level": _any("kernels are compiled ahead: see --compile-ahead"),
    "mm-processor-kwargs": _only("models read text", "{}"),
    "allowed-local-media-path": _only("models read text", ""),
    "disable-async-output-proc": _either("what reads a step's results never holds the next up"),
    "disable-cascade-attn": _either("equal prefixes are read once, and change no bit"),
    "max-parallel-loading-workers": _any("ranks load their shares side by side"),
    "guided-decoding-backend": _only("llguidance holds answers to schemas", "auto", "guidance"),
    "prefix-caching-hash-algo": _any("pages of equal prefixes are found by BLAKE3"),
    "num-scheduler-steps": _any("steps are always planned ahead"),
    "additional-config": _only("there are no plugins", "{}"),
    "worker-cls": _only("there are no plugins", "auto"),
    "worker-extension-cls": _only("there are no plugins", ""),
    "logits-processors": _only("there are no plugins: see logit_bias", "[]"),
    "kv-transfer-config": _only("a KV cache stays where it was made"),
    "enable-sleep-mode": _never("close the model and make a new one"),
    "enable-prompt-embeds": _never("prompts are text or token ids"),
    "disable-sliding-window": _never("windows are what config.json says"),
    "pipeline-parallel-size": _only("models are split by --tp only", "1"),
    "data-parallel-size": _only(
        "one server is one replica: start several behind a load balancer", "1"
    ),
    "enable-expert-parallel": _never("use --experts=lanes"),
    "enable-lora": _never("adapters are not supported: merge them into the checkpoint"),
    "max-loras": _any("adapters are not supported"),
    "max-lora-rank": _any("adapters are not supported"),
    "enable-auto-tool-choice": _either("--tool-call-parser says whether calls are read"),
    "tool-call-parser": _only("texts are whole here: tpdet serve reads the calls of chats"),
    "chat-template-content-format": _only(
        "a message's parts reach the chat template as one text", "auto", "string"
    ),
    "default-chat-template-kwargs": _only(
        "send chat_template_kwargs with each chat; a date has a flag, --chat-template-date", "{}"
    ),
    "reasoning-parser": _only("texts are whole here: tpdet serve splits those of chats"),
    "quantization": _only("how weights are quantised is read from the checkpoint"),
    "speculative-config": _only("--drafts says who proposes tokens, and no bit depends on it"),
    "hf-token": _only("a token here would be seen by everybody (ps): set HF_TOKEN instead"),
    "download-dir": _only("set HF_HOME instead"),
    "allowed-origins": _only(_NO_ORIGINS, "[]"),
    "allowed-methods": _only(_NO_ORIGINS),
    "allowed-headers": _only(_NO_ORIGINS),
    "allow-credentials": _never(_NO_ORIGINS),
    "ssl-keyfile": _only("there is no TLS: put a proxy in front"),
    "ssl-certfile": _only("there is no TLS: put a proxy in front"),
    "disable-custom-all-reduce": _never("use --transport=gather"),
    "api-key": _only(
        "a key here would be seen by everybody (ps): give its file (mode 0600) with "
        "--api-key-file, or set TPDET_API_KEY"
    ),
}
"""By vLLM's flag without its dashes."""


def accept_habit(name: str, value: object, spelled: str | None = None) -> str | None:
    """The sentence for the log if `name` (a flag or keyword of vLLM) asks for what is done anyway.

    The value None asks for nothing. Returns None if the argument is not known here. `spelled` is
    the name as the user wrote it. Raises UsageError if the value cannot be honoured; the message
    never holds it, since it may be secret.
    """
    flag = name.removeprefix("--").replace("_", "-").lower()
    habit = HABITS.get(flag)
    if habit is None:
        return None
    why = habit.why
    if not spelled and not name.startswith("--"):
        why = _FLAG.sub(_keyword, why)
    spelled = spelled or name
    if value is None or habit.values is None or str(value).lower() in habit.values:
        return f"{spelled} changes nothing: {why}"
    if habit.values <= {"true", "false"}:
        raise UsageError(f"{spelled} cannot be honoured: {why}")
    use = " or ".join(sorted(habit.values, key=lambda v: (len(v), v)))
    raise UsageError(f"{spelled} takes only {use}: {why}")


_FLAG = re.compile(r"--([a-z-]+)")


def _keyword(flag: re.Match[str]) -> str:
    """A flag as the keyword that Python's calls have for it."""
    return "tensor_parallel_size" if flag[1] == "tp" else flag[1].replace("-", "_")
