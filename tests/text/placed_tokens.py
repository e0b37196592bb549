"""Small tokenizers, and added tokens placed at random in the four files that declare them."""

import json
import random
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tests.text.byte_bpe import LETTERS

CONTENTS = (
    *("<|end|>", "<|box|>", "<think>", "</think>", "[PAD]", "<s>", "</s>", "<unk>"),
    *("<|im end|>", "ab", "tool", "é!", "<", "<|", "\n\n", "  ", "▁x", "日本"),
)
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
         "mask_token", "image_token", "fake_token")  # fmt: skip
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
WORDS = ("a", "the", " ", "  ", "\n", "\n\n", "\t", "ab", "abé", "tool", "tools", "e\u0301!",
         "日本語", "🎉", "x", "1", "<", "|>", "\u00a0")  # fmt: skip


def byte_level() -> tokenizers.Tokenizer:
    """As Qwen's: NFC, GPT-2's words, bytes."""
    letters = {letter: place for place, letter in enumerate(LETTERS.values())}
    merges = [("t", "o"), ("to", "o"), ("Ġ", "a"), ("<", "|"), ("a", "b")]
    vocab = letters | {a + b: 256 + place for place, (a, b) in enumerate(merges)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def metaspace(prepend: str = "first") -> tokenizers.Tokenizer:
    """As Llama 2's and Mistral's: `▁` for a blank, and byte tokens."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdehilnorstwx<>|/1\n", "▁a", "▁t", "to", "too", "▁▁", "ab"]
    merges = [("▁", "a"), ("▁", "t"), ("t", "o"), ("to", "o"), ("▁", "▁"), ("a", "b")]
    vocab = {word: place for place, word in enumerate(words)}
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend == "normalized":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    if prepend != "never":
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def unigram() -> tokenizers.Tokenizer:
    """As T5's kind: scores in place of merges."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [("▁", -2.0), *((letter, -4.0) for letter in "abcdehilnorstwx<>|/1")]
    pieces += [("▁a", -2.5), ("too", -3.0), ("▁the", -3.0), ("ab", -3.5)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return backend


MAKERS = {
    "byte level": byte_level,
    "metaspace": metaspace,
    "no prefix": lambda: metaspace("never"),
    "prefix of each part": lambda: metaspace("always"),
    "normalized prefix": lambda: metaspace("normalized"),
    "unigram": unigram,
}


def place(folder: Path, make, seed: int) -> list[str]:
    """Write the files of a tokenizer whose tokens are placed by `seed`; the tokens' texts."""
    draw = random.Random(seed)
    backend = make()
    texts = draw.sample(CONTENTS, draw.randint(2, 8))
    in_file = [text for text in texts if draw.random() < 0.5]
    for text in in_file:
        add = backend.add_special_tokens if draw.random() < 0.6 else backend.add_tokens
        add([AddedToken(text, **flags(draw, FLAGS[:4]))])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if draw.random() < 0.6:
        config["added_tokens_decoder"] = described(draw, backend, texts)
    known = {text: id_ for id_, text in described_texts(config)} | {
        token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()
    }
    ends = [text for text in texts if text in known]
    config |= named(draw, texts, ends, "config")
    write(folder, "tokenizer_config", config)
    if draw.random() < 0.5:
        write(folder, "special_tokens_map", named(draw, texts, ends, "map"))
    if draw.random() < 0.4:
        write(folder, "added_tokens", {text: known[text] for text in ends})
    return texts


def described(draw, backend, texts):
    """`added_tokens_decoder`: tokens in any order, new ones with the ids that come next."""
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    found = {}
    for text in draw.sample(texts, draw.randint(0, len(texts))):
        backend.add_tokens([AddedToken(text)])
        some = flags(draw, FLAGS)
        some.pop(draw.choice([*FLAGS, "none"]), None)
        found[str(backend.token_to_id(text))] = {"content": text, **some}
    return found


def described_texts(config):
    items = config.get("added_tokens_decoder", {}).items()
    return [(int(id_), token["content"]) for id_, token in items]


def named(draw, texts, ends, file):
    """Named and listed tokens as text or as objects."""
    typed = {"__type": "AddedToken"} if file == "config" else {}

    def form(text):
        as_text = draw.random() < 0.5
        return text if as_text else {**typed, "content": text, **flags(draw, FLAGS[:4])}

    found = {}
    for name in NAMES:
        choices = ends if name in ("bos_token", "eos_token") else texts
        if choices and draw.random() < 0.3:
            found[name] = form(draw.choice(choices))
        elif draw.random() < 0.1:
            found[name] = None
    kind = draw.choice(["none", "additional_special_tokens", "extra_special_tokens", "named"])
    chosen = draw.sample(texts, draw.randint(0, len(texts)))
    if kind == "named":
        found["extra_special_tokens"] = {f"part_{i}": text for i, text in enumerate(chosen)}
        if typed and draw.random() < 0.5:
            found["model_specific_special_tokens"] = found.pop("extra_special_tokens")
    elif kind != "none":
        found[kind] = chosen if file == "map" else [form(text) for text in chosen]
    return found


def flags(draw, names):
    return {name: draw.random() < 0.4 for name in names}


def write(folder, name, content):
    (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False))


def text(draw, tokens):
    """A text of words and of the tokens, with and without blanks between them."""
    return "".join(draw.choice([*tokens, *WORDS]) for _ in range(draw.randint(0, 12)))
