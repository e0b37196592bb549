"""Regular expressions and choices as masks: the whole text matches, and nothing else is allowed."""

import re

import pytest

from tests.lib.server.harness import write_tokenizer
from tpdet.errors import RequestError
from tpdet.grammar import trial
from tpdet.grammar.byte_texts import byte_vocabulary
from tpdet.grammar.compile import compile_form
from tpdet.grammar.constraint import Constraint, Grammars
from tpdet.requests.answer_form import AnswerForm, regex_of_choice
from tpdet.text.tokenizer import Tokenizer

V, EOS = 512, 258


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    write_tokenizer(folder)
    return Grammars(Tokenizer.load(folder), V)


def allows(grammars, regex: str, text: str) -> bool:
    """Whether `text` may be written token by token, and end there."""
    constraint, output = grammars.constrain(AnswerForm("regex", regex)), list(text.encode())
    for place, token in enumerate(output):
        mask = constraint.next_ids(output[:place], [EOS]).allowed
        if not mask[token >> 3] >> (token & 7) & 1:
            return False
    return constraint.next_ids(output, [EOS]).complete


@pytest.mark.parametrize(
    ("regex", "inside", "outside"),
    [
        ("a|ab", ["a", "ab"], ["", "b", "aba"]),
        ("^(a|b)$", ["a", "b"], ["", "ab"]),
        ("https?://[a-z]+/x", ["http://a/x", "https://bc/x"], ["http:/a/x", "http://a/y"]),
        (r"a\/b[/]", ["a/b/"], ["ab/", r"a\/b/"]),
        (r"\\/", ["\\/"], ["/", "\\\\/"]),
        ("a\nb", ["a\nb"], ["anb", "a b"]),
        (r"[^a]\t.", ["b\tc", "\n\té"], ["a\tc", "b\t\n"]),
        ("(?i)yes", ["yes", "YES"], ["no"]),
        ("a b # c", ["a b # c"], ["ab"]),
        (r'"\d{3}"', ['"123"'], ["123"]),
        ("(a)?", ["", "a"], ["aa"]),
    ],
)
def test_the_whole_text_matches(grammars, regex, inside, outside):
    assert all(re.fullmatch(regex, text) for text in inside)  # as in Python
    assert all(allows(grammars, regex, text) for text in inside)
    assert not any(allows(grammars, regex, text) for text in outside)


def test_a_choice_is_one_of_its_texts_and_none_is_read_as_a_pattern(grammars):
    texts = ("a", "a.c", "", "(", "[x]", r"\d", "a|b", "x/y", "é\n", "-~#&", "日本語", '"q"', " ^$")
    regex = regex_of_choice(texts)
    assert all(allows(grammars, regex, text) for text in texts)
    others = ("abc", "x", "1", "b", "xy", "é", "日", "q", "A", "[", "aa")
    assert not any(allows(grammars, regex, text) for text in others)
    assert all(re.fullmatch(regex, text) for text in texts)


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        ("(a", "(a: unclosed group"),
        ("(?=a)b", "(?=a)b: look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", r"(a)\1: backreferences are not supported"),
        (r"\bfoo", "lookarounds not supported yet"),
        ("abc\\", "regex"),
        (f"{'a' * 300}(", "unclosed group"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(grammars, regex, message):
    form = AnswerForm("regex", regex)
    for refuse in (grammars.constrain, trial.check):
        with pytest.raises(RequestError) as refused:
            refuse(form)
        assert refused.value.param == "structured_outputs"
        assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("regex", "begin"), [("a{40000}", b"aaa"), ("(ab){40000}", b"aba")])
def test_limits_that_others_used_up_change_no_mask(grammars, regex, begin):
    """The library counts the states of all copies together; a long forced text takes them all."""
    form = AnswerForm("regex", regex)
    drafting, beside = grammars.constrain(form), grammars.constrain(form)
    text = list(begin)
    before = [grammars.constrain(form).next_ids(text[:k], [EOS]) for k in range(4)]
    drafting.forced_ids([])
    start = compile_form(form, byte_vocabulary())
    start.deep_copy().compute_ff_bytes()
    with pytest.raises(RequestError, match="too complex"):  # nothing compiles it again
        Constraint(form, start, 256).next_ids([], [])
    for constraint in (beside, drafting, grammars.constrain(form)):
        found = []
        for k in range(4):
            found.append(constraint.next_ids(text[:k], [EOS]))
            constraint.forced_ids(text[:k])
        assert found == before and not any(each.dead for each in found)
