"""vLLM's spellings that tpdet accepts: short dtypes, sizes such as 2k, arguments without an effect.

The command line, the environment, configuration files and `LLM` share them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

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
    values: frozenset[str] | None = None
    switch: bool = False


HABITS = msgspec.json.decode(
    Path(__file__).with_suffix(".json").read_bytes(), type=dict[str, Habit]
)
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
