"""The tokenizer of small random checkpoints: byte-level BPE, trained on Python's own sources.

The text is that of standard library modules, in a fixed order, so one version of Python always
gives the same tokenizer, without a network.
"""

import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from importlib.abc import InspectLoader
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tpdet.errors import NotFoundError, UsageError

_CORPUS = (
    "argparse", "difflib", "doctest", "inspect", "logging", "optparse", "pathlib", "random",
    "statistics", "string", "subprocess", "tarfile", "textwrap", "threading", "typing",
)  # fmt: skip
MIN_VOCAB_SIZE = 1024
_BEGIN, _TURN, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# The words of Qwen2: transformers builds a tokenizer with them for a Qwen configuration, whatever
# tokenizer.json says.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(directory: Path | str, vocab_size: int) -> dict[str, int]:
    """Write tokenizer.json, tokenizer_config.json (with a chat template), special_tokens_map.json.

    The vocabulary has exactly `vocab_size` ids: 256 bytes, merges, and last the special tokens.
    Returns `bos_token_id`, `eos_token_id` and `pad_token_id`. Raises UsageError for fewer than 1024
    ids and for more than the text supports, NotFoundError where Python has no sources.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(f"vocabulary of {vocab_size}: use at least {MIN_VOCAB_SIZE}")
    tokenizer = _trained(vocab_size)
    if (reached := tokenizer.get_vocab_size()) != vocab_size:
        raise UsageError(
            f"vocabulary of {vocab_size}: the text to train on supports {reached}, use at most that"
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", "utf-8")
    named = {"bos_token": _BEGIN, "eos_token": _END, "pad_token": _BEGIN}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "special_tokens_map.json", named)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return {f"{name}_id": ids[token] for name, token in named.items()}


@cache
def _trained(vocab_size: int) -> Tokenizer:
    """Trained once in a process; nobody changes it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = (_BEGIN, _TURN, _END)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BEGIN} $A",
        pair=f"{_BEGIN} $A {_BEGIN} $B",
        special_tokens=[(_BEGIN, tokenizer.token_to_id(_BEGIN))],
    )
    return tokenizer


def _corpus() -> list[str]:
    """The sources, in order."""
    texts = []
    for name in _CORPUS:
        spec = importlib.util.find_spec(name)
        loader = None if spec is None else spec.loader
        source = loader.get_source(name) if isinstance(loader, InspectLoader) else None
        if not source:
            raise NotFoundError(f"this Python has no source of {name!r}: use a full installation")
        texts.append(source)
    return texts


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write indented JSON, as the files of a model are."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
