"""The models that are fuzzed: random weights, of families that differ in kind."""

import argparse
import inspect
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tpdet.tools.synthetic.make_model import make_model

SENTENCEPIECE = "sentencepiece"
FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", SENTENCEPIECE)
"""Plain, experts, experts with windows, windows, and a tokenizer with byte tokens."""
VOCABULARY, CONTEXT = 1100, 1024
_TRAINED = 700  # tokens beside bytes


def make(family: str, folder: Path) -> Path:
    """The model of a family, made once in `folder`."""
    like = "llama" if family == SENTENCEPIECE else family
    directory = folder / family
    if not directory.exists():
        sizes = {"hidden": 64, "layers": 2, "intermediate": 128}
        make_model(directory, like=like, vocab=VOCABULARY, context=CONTEXT, **sizes)
        if family == SENTENCEPIECE:
            _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    """As Llama 2's: blanks are letters, bytes are tokens, and ids at the end have no text."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=_TRAINED, show_progress=False)
    trained.train_from_iterator([inspect.getsource(argparse)], trainer)
    model = json.loads(trained.to_str())["model"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += sorted(model["vocab"], key=model["vocab"].get)
    whole = tokenizers.Tokenizer(
        models.BPE(
            {word: place for place, word in enumerate(words)},
            [tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    whole.pre_tokenizer = trained.pre_tokenizer
    letters = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    whole.decoder = decoders.Sequence([*letters, decoders.Strip(content=" ", left=1, right=0)])
    special = [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")]
    whole.add_special_tokens(special)
    whole.save(str(directory / "tokenizer.json"))
    for name in ("config.json", "generation_config.json"):
        values = json.loads((directory / name).read_text()) | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 1,
        }
        (directory / name).write_text(json.dumps(values))
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "special_tokens_map.json").write_text(json.dumps(named))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False} | named
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
