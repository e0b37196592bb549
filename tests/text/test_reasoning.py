"""Answers that are split into reasoning and content by the tokens that mark them."""

import random
import re

import pytest

from tests.lib.server.harness import write_tokenizer
from tpdet.errors import CheckpointError, UsageError
from tpdet.grammar.schema_start import SchemaStart
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.work import prepare_call
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import SamplingParams, TokenOutput
from tpdet.text.outputs import ChoiceAssembler
from tpdet.text.parsing.reasoning import BLOCKS, ReasoningParser, check_marks
from tpdet.text.tokenizer import Tokenizer, read_files

THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
TURN = "<|im_start|>assistant\n"
STARTED = "<|start|>assistant"
WORDS = ("a", " b", "\n", "é", "日", "🙂", "x")


def tokenizer_with(folder, marks) -> Tokenizer:
    write_tokenizer(folder, marks=marks)
    return Tokenizer.load(folder)


def parser_of(name, tokenizers):
    return ReasoningParser.of(name, tokenizers[name])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        name: tokenizer_with(tmp_path_factory.mktemp(name), marks)
        for name, marks in (("think", THINK), ("harmony", HARMONY))
    }


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def run(tokenizer, ids, splitter, end=None, **params):
    """An answer of these tokens, its deltas and its assembler."""
    wanted = SamplingParams(**params)
    assembler = ChoiceAssembler(tokenizer, wanted, splitter)
    deltas = []
    for place, token in enumerate(ids):
        last = place == len(ids) - 1
        stop = token if last and token == end else None
        reason = None if not last else "stop" if stop is not None else "length"
        deltas.append(assembler.push(TokenOutput("r", 0, token, -1.0, (), reason, stop)))
        so_far = assembler.so_far(0)
        # Streamed is whole, at every cut.
        assert so_far.text == "".join(delta.text for delta in deltas)
        assert so_far.reasoning == "".join(delta.reasoning for delta in deltas)
        if assembler.finish_reason is not None:
            break
    return assembler.answer(0), deltas, assembler


def split(tokenizers, name, prompt, answer, **how):
    """(reasoning, content, number of the reasoning's tokens) of an answer written as text."""
    tokenizer = tokenizers[name]
    splitter = parser_of(name, tokenizers).splitter(ids_of(tokenizer, prompt))
    ids = answer if isinstance(answer, list) else ids_of(tokenizer, answer)
    found, _, assembler = run(tokenizer, ids, splitter, **how)
    return found.reasoning, found.text, assembler.reasoning_tokens


@pytest.mark.parametrize(
    ("prompt", "answer", "reasoning", "content"),
    [
        (TURN, "<think>\nwhy</think>\n\nyes", "\nwhy", "\n\nyes"),
        (TURN, "\n<think>why</think>yes", "why", "\nyes"),
        (TURN, "yes", "", "yes"),
        (TURN, "<think>cut in the mid", "cut in the mid", ""),
        (TURN, "<think></think>yes", "", "yes"),
        (f"{TURN}<think>\n", "why</think>yes", "why", "yes"),
        (f"{TURN}<think>\n", "<think>why</think>yes", "why", "yes"),
        (f"{TURN}<think>\n", "cut", "cut", ""),
        (f"{TURN}<think>\nso", " far</think>yes", " far", "yes"),  # a message that is continued
        (f"{TURN}<think>\n\n</think>\n\n", "yes", "", "yes"),  # enable_thinking: false
        (f"{TURN}<think>\n\n</think>\n\n", "<think> is a tag", "", "<think> is a tag"),
        (TURN, "the tag <think> and </think>", "", "the tag <think> and </think>"),
        (TURN, "</think>yes", "", "</think>yes"),
        (TURN, "<think>a<think>b</think>yes", "a<think>b", "yes"),
        (TURN, "<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
        (f"a <think> in the question {TURN}", "yes", "", "yes"),
    ],
)
def test_one_block_between_think_marks_is_the_reasoning(
    tokenizers, prompt, answer, reasoning, content
):
    tokens = len(ids_of(tokenizers["think"], reasoning))
    expected = reasoning, content, tokens
    assert split(tokenizers, "think", prompt, answer) == expected
    assert split(tokenizers, "think", prompt, answer, skip_special_tokens=False) == expected


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("prompt", "answer", "reasoning", "content"),
    [
        (
            STARTED,
            f"<|channel|>analysis<|message|>why<|end|>{STARTED}<|channel|>final<|message|>yes",
            *("why", "yes"),
        ),
        (STARTED, "<|channel|>analysis<|message|>cut", "cut", ""),
        (STARTED, "<|channel|>analys", "", ""),
        (STARTED, "<|channel|>final<|message|>yes", "", "yes"),
        (STARTED, "<|channel|>commentary<|message|>I ask now.<|end|>", "", "I ask now."),
        (STARTED, "<|channel|>commentary to=functions.f json<|message|>{}", "{}", ""),
        (STARTED, "<|message|>yes", "", "yes"),
        (STARTED, "no header", "", "no header"),
        (
            STARTED,
            f"<|channel|>analysis<|message|>a<|end|>{STARTED} to=functions.f<|channel|>commentary"
            f"<|message|>b<|end|>{STARTED}<|channel|>analysis<|message|>c<|end|>after",
            *("abc", "after"),
        ),
        (f"{STARTED}<|channel|>final<|message|>so", " far<|end|>", "", " far"),
        (f"{STARTED}<|channel|>analysis<|message|>so", " far<|end|>", " far", ""),
        (f"<|start|>user<|message|>analysis<|end|>{STARTED}", "yes", "", "yes"),
    ],
)
def test_the_channel_of_a_message_says_what_it_is(
    tokenizers, prompt, answer, reasoning, content, skip
):
    found = split(tokenizers, "harmony", prompt, answer, skip_special_tokens=skip)
    assert found == (reasoning, content, len(reasoning))


def test_letters_that_spell_a_mark_are_text(tokenizers):
    """Negative control: the ids of the marks count, not their letters."""
    for name, text in (
        ("think", "<think>a</think>b"),
        ("harmony", "<|channel|>analysis<|message|>"),
    ):
        assert split(tokenizers, name, TURN, [*text.encode()]) == ("", text, 0)


def test_without_a_splitter_all_is_in_the_text(tokenizers):
    tokenizer, text = tokenizers["think"], "<think>why</think>yes"
    found, deltas, assembler = run(tokenizer, ids_of(tokenizer, text), None)
    assert (found.text, found.reasoning, assembler.reasoning_tokens) == (text, "", 0)
    assert not any(delta.reasoning for delta in deltas)


def think_labels(text) -> str:
    """r, c or - for each character of a whole text with all marks shown, by its letters."""
    opening = re.compile(r"\s*<think>")
    found = opening.match(text)
    if found is None:
        return "c" * len(text)
    labels = "c" * (found.end() - 7) + "-" * 7
    while found := opening.match(text, len(labels)):
        labels += "r" * (found.end() - 7 - len(labels)) + "-" * 7
    end = text.find("</think>", len(labels))
    if end < 0:
        return labels.ljust(len(text), "r")
    return (labels.ljust(end, "r") + "-" * 8).ljust(len(text), "c")


def labelled(text, labels):
    """(reasoning, content) of a text whose characters have labels."""
    pairs = [*zip(text, labels, strict=False)]
    return tuple("".join(c for c, label in pairs if label == part) for part in "rc")


def think_oracle(text):
    return labelled(text, think_labels(text))


def harmony_oracle(text):
    parts = {"analysis": "", "final": ""}
    for name, body in re.findall(
        r"<\|channel\|>(\w+)<\|message\|>(.*?)(?:<\|end\|>|\Z)", text, re.S
    ):
        parts[name] += body
    return parts["analysis"], parts["final"]


def made_answer(name, generator) -> str:
    def words(most):
        return "".join(generator.choices(WORDS, k=generator.randrange(most)))

    if name == "think":
        return "".join(generator.choice([*THINK, words(4), words(2)]) for _ in range(8))
    messages = [
        f"<|channel|>{generator.choice(['analysis', 'final'])}<|message|>{words(6)}"
        for _ in range(generator.randrange(1, 4))
    ]
    return f"<|end|>{STARTED}".join(messages)


@pytest.mark.parametrize("name", ["think", "harmony"])
def test_any_answer_splits_as_its_whole_text_does(tokenizers, name):
    generator = random.Random(7)
    tokenizer, parser = tokenizers[name], parser_of(name, tokenizers)
    oracle = think_oracle if name == "think" else harmony_oracle
    prompt = ids_of(tokenizer, TURN if name == "think" else STARTED)
    both = 0
    for _ in range(300):
        text = made_answer(name, generator)
        ids = ids_of(tokenizer, text) or [97]
        found, _, _ = run(tokenizer, ids, parser.splitter(prompt))
        assert (found.reasoning, found.text) == oracle(text or "a"), text
        both += bool(found.reasoning and found.text)
        hidden, deltas, _ = run(tokenizer, ids, parser.splitter(prompt, keep=False))
        assert (hidden.reasoning, hidden.text) == ("", found.text)
        assert not any(delta.reasoning for delta in deltas)
    assert both > 30  # the cases are of both kinds


def test_nothing_but_the_split_depends_on_the_parser(tokenizers):
    """Stop strings, ids, offsets and ends are those of the whole text, also where bytes are cut."""
    generator = random.Random(11)
    tokenizer = tokenizers["think"]
    parser, opening, closing = parser_of("think", tokenizers), 259, 260
    letters = [*"ab é\n".encode(), 0xC3, 0xF0, opening, closing]
    stopped = both = 0
    for _ in range(400):
        ids = [opening] * generator.randrange(2) + generator.choices(letters, k=12)
        how = {
            "stop": tuple("".join(generator.choices("ab é<>k/", k=2)) for _ in range(2)),
            "include_stop_str_in_output": generator.random() < 0.5,
            "stop_token_ids": (closing,) if generator.random() < 0.2 else (),
        }
        end = closing if how["stop_token_ids"] else None
        plain, _, _ = run(tokenizer, ids, None, end, **how)
        found, _, _ = run(tokenizer, ids, parser.splitter([1]), end, **how)
        for field in ("token_ids", "logprobs", "offsets", "finish_reason", "stop_reason"):
            assert getattr(found, field) == getattr(plain, field), field
        whole, _, _ = run(tokenizer, ids, None)
        assert whole.text.startswith(plain.text)
        expected = labelled(plain.text, think_labels(whole.text))
        assert (found.reasoning, found.text) == expected, whole.text
        both += all(expected)
        stopped += found.finish_reason == "stop"
    assert 50 < stopped < 390 and both > 50


def test_a_character_cut_off_by_a_mark_stays_in_its_part(tokenizers):
    half = "é".encode()[0]
    opening, closing = ids_of(tokenizers["think"], "<think></think>")
    found = split(tokenizers, "think", TURN, [opening, 97, half, closing, 98])
    assert found[:2] == ("a\ufffd", "b")
    answer = "<|channel|>analysis<|message|>"
    ids = [*ids_of(tokenizers["harmony"], answer), 97, half]
    for skip in (True, False):
        for more in ("<|end|>", f"<|end|>{STARTED}<|channel|>final<|message|>b"):
            rest = ids_of(tokenizers["harmony"], more)
            found = split(tokenizers, "harmony", STARTED, ids + rest, skip_special_tokens=skip)
            assert found[:2] == ("a\ufffd", "b" * more.endswith("b"))


def test_a_stop_string_may_end_the_reasoning_or_the_content(tokenizers):
    answer = "<think>one two</think>three"
    assert split(tokenizers, "think", TURN, answer, stop=("two",)) == ("one ", "", 7)
    assert split(tokenizers, "think", TURN, answer, stop=("ree",))[:2] == ("one two", "th")
    # As ever, marks that are no special tokens are in the text that is looked at.
    assert split(tokenizers, "think", TURN, answer, stop=("o</think>t",))[:2] == ("one tw", "")
    shown = {"stop": ("o</think>t",), "include_stop_str_in_output": True}
    assert split(tokenizers, "think", TURN, answer, **shown)[:2] == ("one two", "t")


def test_the_parser_is_found_by_the_tokenizers_marks(tokenizers, tmp_path):
    plain = tokenizer_with(tmp_path / "plain", ())
    for name, tokenizer in tokenizers.items():
        assert ReasoningParser.of("auto", tokenizer).name == name
        assert ReasoningParser.of(name, tokenizer).name == name
        assert ReasoningParser.of("off", tokenizer) is None
    assert ReasoningParser.of("auto", plain) is None and ReasoningParser.of("auto", None) is None
    with pytest.raises(
        UsageError, match=r"think: .* no added tokens <think> and </think>, or <seed"
    ):
        ReasoningParser.of("think", plain)
    with pytest.raises(UsageError, match=r"--reasoning-parser harmony: .* use auto or off"):
        ReasoningParser.of("harmony", tokenizers["think"])
    with pytest.raises(UsageError, match="think needs a tokenizer"):
        ReasoningParser.of("think", None)


def test_marks_are_missed_in_the_files_before_a_start(tmp_path):
    write_tokenizer(tmp_path, marks=THINK)
    files = read_files(tmp_path)
    for setting in ("off", "auto", "think"):
        check_marks(setting, files)
    with pytest.raises(UsageError, match="no added tokens"):
        check_marks("harmony", files)
    with pytest.raises(UsageError, match="needs a tokenizer"):
        check_marks("think", None)
    for damaged in ("{}", '{"model": {"vocab": 3}, "added_tokens": [3, {"content": 3, "id": 4}]}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises((CheckpointError, UsageError)):
            check_marks("think", read_files(tmp_path))


@pytest.mark.parametrize("marks", BLOCKS)
def test_a_block_may_have_the_marks_of_another_family(tmp_path, marks):
    tokenizer = tokenizer_with(tmp_path, marks)
    parser = ReasoningParser.of("auto", tokenizer)
    assert (parser.name, parser.marks) == ("think", marks)
    ids = ids_of(tokenizer, f"{marks[0]}why{marks[1]}yes")
    found, _, assembler = run(tokenizer, ids, parser.splitter([1]))
    assert (found.reasoning, found.text, assembler.reasoning_tokens) == ("why", "yes", 3)
    found, _, _ = run(tokenizer, ids[1:], parser.splitter([ids[0], 10]))
    assert (found.reasoning, found.text) == ("why", "yes")


@pytest.mark.parametrize(
    ("name", "prompt", "mark"),
    [
        ("think", TURN, "<think></think>"),
        ("think", f"a <think> in the question {TURN}", "<think></think>"),
        ("think", f"{TURN}<think>\n", "</think>"),
        ("think", f"{TURN}<think>\nso", "</think>"),
        ("think", f"{TURN}<think>\n\n</think>\n\n", ""),  # enable_thinking: false
        ("harmony", STARTED, "<|channel|>final<|message|>"),
        ("harmony", f"<|start|>user<|message|>why<|end|>{STARTED}", "<|channel|>final<|message|>"),
        ("harmony", f"{STARTED}<|channel|>final<|message|>so", ""),
        ("harmony", f"{STARTED}<|channel|>analysis<|message|>so", ""),
        ("harmony", f"{STARTED}<|channel|>", ""),
    ],
)
def test_a_schema_holds_behind_the_mark_that_the_prompt_leaves_open(tokenizers, name, prompt, mark):
    ids = ids_of(tokenizers[name], prompt)
    found = parser_of(name, tokenizers).schema_after(ids)
    assert found == tuple(ids_of(tokenizers[name], mark))


@pytest.mark.parametrize(
    ("name", "answer", "begin"),
    [
        ("think", "<think>{</think>{}", "{}"),
        ("think", "{}", "{}"),
        ("harmony", "<|channel|>analysis<|message|>a<|end|>" + STARTED, None),
        ("harmony", f"<|channel|>final<|message|>{{}}<|end|>{STARTED}", "{}"),
        ("harmony", "<|channel|>final <|constrain|>json<|message|>{}", "{}"),
        (
            "harmony",
            f"<|channel|>analysis<|message|>final<|end|>{STARTED}<|channel|>final<|message|>{{}}",
            "{}",
        ),
        ("harmony", "{}", "{}"),
    ],
)
def test_where_the_schema_begins_the_content_does(tokenizers, name, answer, begin):
    tokenizer = tokenizers[name]
    ids = ids_of(tokenizer, answer)
    prompt = ids_of(tokenizer, TURN if name == "think" else STARTED)
    start = SchemaStart(parser_of(name, tokenizers).schema_after(prompt), len(prompt))
    found = start.begin(prompt + ids, len(prompt) + len(ids))
    if begin is None:
        assert found is None
    else:
        rest = tokenizer.decode((prompt + ids)[found:], skip_special_tokens=False)
        assert rest.startswith(begin)
        assert split(tokenizers, name, TURN if name == "think" else STARTED, answer)[1] == begin


def test_a_mark_that_the_model_has_no_logits_of_leaves_the_schema_where_it_was(tokenizers):
    facts = EngineFacts("fp", "c0" * 32, "d1" * 32, 256, 512, (258,), 1, "", "float32")
    chat = {"messages": [{"role": "user", "content": "a"}]}
    schema = {"response_format": {"type": "json_object"}}
    preparer, parser = Preparer(facts, "m", tokenizers["think"]), parser_of("think", tokenizers)
    call = prepare_call("chat", preparer, chat | schema, "r")
    found = call.reasoning_first(parser, 261)
    assert found.requests[0].params.json_schema_after == parser.schema_after([]) == (259, 260)
    assert call.reasoning_first(parser, 260) == call
    free = prepare_call("chat", preparer, chat, "r")
    assert free.reasoning_first(parser, 261) == free
    completion = prepare_call("completion", preparer, {"prompt": "a"} | schema, "r")
    assert completion.reasoning_first(parser, 261) == completion
