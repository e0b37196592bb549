"""Answers from tokens: text, stops, lengths that agree, numbers as clients read them."""

import json
import math
import random
import struct

import numpy
import pytest

from tpdet.errors import RequestError
from tpdet.requests.request import (
    Candidate,
    PromptOutput,
    Request,
    RequestFailed,
    SamplingParams,
    TokenOutput,
)
from tpdet.text import outputs
from tpdet.text.outputs import ChoiceAssembler, RequestAssembler, logprob_bits, shortest_float32

END = 0  # a token whose text would be "<end>"


class PieceDetokenizer:
    """Ids are places in a list of byte strings; a character comes out when its bytes are whole."""

    def __init__(self, tokenizer: list[bytes], skip_special_tokens: bool) -> None:
        self.pieces = tokenizer
        self.skip = skip_special_tokens
        self.bytes = b""

    def push(self, token_id: int) -> str:
        if token_id == END and self.skip:
            return ""
        self.bytes += self.pieces[token_id]
        try:
            text, self.bytes = self.bytes.decode(), b""
        except UnicodeDecodeError as error:
            text, self.bytes = self.bytes[: error.start].decode(), self.bytes[error.start :]
        return text

    def start_in(self, text: str, token_id: int) -> int:
        return 0

    def finish(self) -> str:
        text, self.bytes = self.bytes.decode(errors="replace"), b""
        return text


@pytest.fixture(autouse=True)
def _pieces_as_tokenizer(monkeypatch):
    monkeypatch.setattr(outputs, "IncrementalDetokenizer", PieceDetokenizer)


def stream(
    pieces: list[bytes],
    params: SamplingParams,
    finish: str = "length",
    stop_token_id: int | None = None,
    choice: int = 0,
) -> tuple[list[bytes], list[TokenOutput]]:
    """A vocabulary of the pieces and the outputs of an engine that commits them in order."""
    vocabulary = [b"<end>", *pieces]
    ids = list(range(1, len(vocabulary)))
    if stop_token_id is not None:
        ids.append(stop_token_id)
    made = []
    for place, token in enumerate(ids):
        last = place == len(ids) - 1
        made.append(
            TokenOutput(
                request_id="r",
                choice=choice,
                token_id=token,
                logprob=-0.5 * token,
                top=(Candidate(token, -0.5 * token),),
                finish_reason=finish if last else None,
                stop_token_id=stop_token_id if last else None,
            )
        )
    return vocabulary, made


def run(pieces, params, **how):
    vocabulary, made = stream(pieces, params, **how)
    assembler = ChoiceAssembler(vocabulary, params)
    deltas = [assembler.push(output) for output in made]
    return assembler.answer(0), deltas


def cut(data: bytes, generator: random.Random) -> list[bytes]:
    places = sorted(generator.choices(range(len(data) + 1), k=generator.randrange(1, 9)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def test_any_split_into_tokens_gives_the_same_text_streamed_and_whole():
    generator = random.Random(5)
    for _ in range(400):
        text = "".join(generator.choices(["a", "b", "é", "日", "🙂", "\n"], k=20))
        stops = tuple("".join(generator.choices("abé\n", k=2)) for _ in range(2))
        params = SamplingParams(stop=stops, include_stop_str_in_output=generator.random() < 0.5)
        answers = set()
        for _ in range(4):
            answer, deltas = run(cut(text.encode(), generator), params)
            assert "".join(delta.text for delta in deltas) == answer.text
            answers.add((answer.text, answer.finish_reason, answer.stop_reason))
        assert len(answers) == 1


def test_a_stop_string_across_tokens_cuts_the_text_and_asks_for_an_abort():
    params = SamplingParams(stop=("STOP",))
    answer, deltas = run([b"one S", b"TO", b"P two", b" three"], params)
    assert [delta.text for delta in deltas] == ["one ", "", "", ""]
    assert [delta.abort for delta in deltas] == [False, False, True, False]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("one ", "stop", "STOP")
    assert answer.token_ids == (1, 2, 3)
    assert [token.token_id for token in answer.logprobs] == [1, 2, 3]
    assert deltas[3] == outputs.TextDelta()


def test_a_stop_string_in_the_last_token_of_the_length_wins_and_needs_no_abort():
    answer, deltas = run([b"one ", b"STOP"], SamplingParams(stop=("STOP",)))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("one ", "stop", "STOP")
    assert not deltas[-1].abort


def test_an_offset_is_where_its_token_begins_in_the_whole_text():
    answer, deltas = run([b"one", b" \xc3", b"\xa9S", b"TO", b"x"], SamplingParams(stop=("STOP",)))
    assert answer.text == "one \xe9STOx" and answer.offsets == (0, 3, 4, 6, 8)
    assert tuple(delta.offset for delta in deltas) == answer.offsets
    answer, _ = run([b"one S", b"TO", b"P two"], SamplingParams(stop=("STOP",)))
    assert answer.text == "one " and answer.offsets == (0, 5, 7)


def test_held_text_is_released_at_the_end():
    answer, deltas = run([b"one S", b"TO"], SamplingParams(stop=("STOP",)))
    assert [delta.text for delta in deltas] == ["one ", "STO"]
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)


def test_an_incomplete_character_is_released_at_the_end():
    answer, _ = run(["é".encode()[:1]], SamplingParams())
    assert answer.text == "\ufffd"


def test_min_tokens_postpones_stop_strings():
    pieces = [b"x", b"yx", b"y", b"z"]
    for minimum, text in ((0, ""), (1, ""), (2, "xy"), (3, "xyxyz")):
        answer, _ = run(pieces, SamplingParams(stop=("xy",), min_tokens=minimum))
        assert answer.text == text


def test_the_stop_token_is_in_the_ids_and_not_in_the_text():
    how = {"finish": "stop", "stop_token_id": END}
    for include, skip, text in (
        (False, False, "one"),
        (True, False, "one<end>"),
        (True, True, "one"),
    ):
        params = SamplingParams(
            stop_token_ids=(END,), include_stop_str_in_output=include, skip_special_tokens=skip
        )
        answer, _ = run([b"one"], params, **how)
        assert (answer.text, answer.token_ids) == (text, (1, END))
        assert len(answer.logprobs) == 2
        assert (answer.finish_reason, answer.stop_reason) == ("stop", END)


def test_the_models_own_end_token_gives_no_stop_reason():
    answer, _ = run([b"one"], SamplingParams(), finish="stop", stop_token_id=END)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_ids_alone_need_no_tokenizer_but_stop_strings_do():
    _, made = stream([b"one", b"two"], SamplingParams())
    assembler = ChoiceAssembler(None, SamplingParams())
    assert [assembler.push(output).text for output in made] == ["", ""]
    assert assembler.answer(0).token_ids == (1, 2)
    with pytest.raises(RequestError, match="tokenizer"):
        ChoiceAssembler(None, SamplingParams(stop=("x",)))


def request(**parameters) -> Request:
    return Request(request_id="r", prompt_token_ids=(1, 2), params=SamplingParams(**parameters))


def test_a_request_without_tokens_to_make_ends_with_its_prompt_scores():
    assembler = RequestAssembler(request(max_tokens=0, prompt_logprobs=1), None)
    prompt = PromptOutput("r", (None, -1.5), ((), (Candidate(2, -1.5),)), (0, 1))
    assert assembler.push(prompt) is None
    assert not assembler.finished
    delta = assembler.push(TokenOutput("r", 0, -1, 0.0, (), "length"))
    assert (delta.token_ids, delta.finish_reason) == ((), "length")
    answer = assembler.answer()
    assert answer.prompt == prompt
    assert answer.choices[0].token_ids == ()


def test_choices_are_gathered_by_index_in_any_order_of_arrival():
    params = {"n": 3, "stop": ("!",)}
    vocabulary, first = stream([b"a", b"b"], SamplingParams(**params), choice=2)
    _, second = stream([b"a"], SamplingParams(**params), choice=0)
    _, third = stream([b"a", b"b", b"c"], SamplingParams(**params), choice=1)
    assembler = RequestAssembler(request(**params), [*vocabulary, b"!"])
    for output in (first[0], second[0], third[0], third[1], first[1]):
        assembler.push(output)
    assert not assembler.finished
    with pytest.raises(ValueError, match="choice 1"):
        assembler.answer()
    delta = assembler.push(third[2])  # its text is "!"
    assert delta.finish_reason == "stop"
    assert [choice.text for choice in assembler.answer().choices] == ["a", "ab", "ab"]


def test_an_answer_that_is_whole_while_the_engine_runs_on_asks_for_an_abort():
    assembler = RequestAssembler(request(stop=("b",)), [b"<end>", b"a", b"b"])
    assert not assembler.push(TokenOutput("r", 0, 1, -1.0)).abort
    assert assembler.push(TokenOutput("r", 0, 2, -1.0)).abort
    assert assembler.finished
    assert not assembler.push(TokenOutput("r", 0, 1, -1.0, (), "length")).abort


def test_a_failed_request_has_no_answer():
    assembler = RequestAssembler(request(), None)
    assembler.push(RequestFailed("r", "numerical_error", "NaN in the logits"))
    assert assembler.finished
    with pytest.raises(ValueError, match="NaN in the logits"):
        assembler.answer()


def test_numbers_are_written_as_the_shortest_that_reads_back():
    generator = random.Random(1)
    for _ in range(2_000):
        value = struct.unpack(">f", struct.pack(">f", -generator.expovariate(0.2)))[0]
        written = json.dumps(shortest_float32(value))
        assert numpy.float32(written) == numpy.float32(value)
        assert float(str(numpy.float32(value))) == float(written)
        assert struct.unpack(">f", bytes.fromhex(logprob_bits(value)))[0] == value
    assert shortest_float32(-math.inf) == -9999.0
    assert json.dumps(shortest_float32(float(numpy.float32(-0.1)))) == "-0.1"
    assert (logprob_bits(-1.0), logprob_bits(-math.inf)) == ("bf800000", "ff800000")
    values = [-1.0, -math.inf, -0.0, -1e-40]
    assert outputs.all_logprob_bits(values) == tuple(map(logprob_bits, values))
    assert outputs.all_logprob_bits([]) == ()
