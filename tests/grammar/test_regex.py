"""Regular expressions and choices as masks: the whole text matches, and nothing else is allowed."""

import re

import pytest

from tests.lib.server.harness import write_tokenizer
from tpdet.arguments.answer_form import AnswerForm, regex_of_choice
from tpdet.errors import RequestError
from tpdet.grammar import trial
from tpdet.grammar.constraint import Grammars
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
