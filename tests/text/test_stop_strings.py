"""Stop strings: one answer whatever the pieces, and no text released too early or too late."""

import random

import pytest

from tpdet.text.stop_strings import StopStringMatcher


def run(
    pieces: list[str], stops: tuple[str, ...], include: bool = False
) -> tuple[list[str], str | None]:
    matcher = StopStringMatcher(stops, include)
    released = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        released.append(text)
        if stop is not None:
            return released, stop
    return [*released, matcher.flush()], None


def cut(text: str, generator: random.Random) -> list[str]:
    places = sorted(generator.choices(range(len(text) + 1), k=generator.randrange(8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def expected(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The definition, character by character: complete first, then begun first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_any_split_gives_the_text_of_the_definition(include):
    generator = random.Random(3)
    for _ in range(3_000):
        text = "".join(generator.choices("ab\nc", k=generator.randrange(25)))
        stops = tuple(
            "".join(generator.choices("ab\nc", k=generator.randrange(1, 6)))
            for _ in range(generator.randrange(4))
        )
        released, stop = run(cut(text, generator), stops, include)
        assert ("".join(released), stop) == expected(text, stops, include)


def test_control_a_matcher_that_looks_at_one_piece_at_a_time_is_caught():
    def naive(pieces: list[str], stop: str) -> str:
        text = ""
        for piece in pieces:
            if stop in piece:
                return text + piece[: piece.index(stop)]
            text += piece
        return text

    assert naive(["one ST", "OP two"], "STOP") != expected("one STOP two", ("STOP",), False)[0]


def test_text_is_held_only_while_it_could_begin_a_stop_string():
    matcher = StopStringMatcher(("STOP", "TOO"))
    assert matcher.push("a S") == ("a ", None)
    assert matcher.push("T") == ("", None)
    assert matcher.push("O") == ("", None)
    assert matcher.push("x") == ("STOx", None)
    assert matcher.push("T") == ("", None)
    assert matcher.flush() == "T"


def test_a_match_that_is_complete_first_wins_over_one_that_began_first():
    assert run(["abcd"], ("abcd", "bc")) == (["a"], "bc")
    assert run(["abc"], ("bc", "abc")) == ([""], "abc")


def test_overlapping_beginnings_are_followed():
    assert run(list("aaab"), ("aab",)) == (["", "", "a", ""], "aab")


def test_a_piece_that_may_not_stop_can_begin_but_not_complete_a_match():
    matcher = StopStringMatcher(("xy",))
    assert matcher.push("xyx", may_stop=False) == ("xy", None)
    assert matcher.push("y.") == ("", "xy")


def test_without_stop_strings_everything_is_released_at_once():
    assert run(["a", "", "b"], ()) == (["a", "", "b", ""], None)
