"""Holds golden answers against a target, and says what differs so that a stranger understands."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tpdet.audit.fingerprint import read_fingerprint
from tpdet.audit.recorded import Difference, Scored
from tpdet.errors import CheckpointError
from tpdet.requests.answer.json_pieces import to_json
from tpdet.tools.check.answers import BatchLine, Line, line_of
from tpdet.tools.check.computed import Compared, changed_parts
from tpdet.tools.check.targets import AnswerTarget, compare_each
from tpdet.tools.golden.golden_file import Json

_TEXT_BEFORE = 8
"""Tokens before the place of a difference whose text is shown."""
_PARTS = 8
"""Differing fields that are shown of an answer whose tokens are equal."""


class Verdict(NamedTuple):
    """What was found of one golden: `text` says what differs, or why it cannot be compared."""

    name: str
    equal: bool
    comparable: bool = True
    text: str = ""


def line_of_golden(name: str, stored: Json, source: str) -> Line:
    """A stored answer as `tpdet check` takes it. Raises CheckpointError."""
    where = f"golden {name!r} of {source}"
    line = line_of(stored, where, name=where)
    if not isinstance(line.answer, BatchLine):
        raise CheckpointError(f"{where} has no request: write it anew")
    return line


def verdicts(target: AnswerTarget, goldens: Mapping[str, Json], source: str) -> list[Verdict]:
    """A verdict on each golden, in their order. Raises as `Connection` and `LLM`."""
    lines = [line_of_golden(name, stored, source) for name, stored in goldens.items()]
    every = zip(goldens, lines, compare_each(lines, target.compare), strict=True)
    return [
        Verdict(name, False, False, f"{line.where} cannot be compared: {found}")
        if isinstance(found, str)
        else _verdict(target, name, found)
        for name, line, found in every
    ]


def changed_request(stored: Json, url: str, body: Json) -> str:
    """How a test's request differs from the recorded one; empty if it does not."""
    recorded = stored["request"]
    variables = recorded["body"].get("chat_template_kwargs") or {}
    asked = {**body, "return_token_ids": True}
    if "current_date" in variables and "current_date" not in (
        asked.get("chat_template_kwargs") or {}
    ):
        pinned = {"current_date": variables["current_date"]}  # by the recording
        asked["chat_template_kwargs"] = pinned | (asked.get("chat_template_kwargs") or {})
    parts = changed_parts(recorded, {"url": url, "body": asked})
    return "\n".join(f"  {str(part).replace(', computed ', ', asked for now ')}" for part in parts)


def _verdict(target: AnswerTarget, name: str, compared: Compared) -> Verdict:
    line = compared.line
    if not compared.differences:
        return Verdict(name, True)
    recorded = read_fingerprint(line.body.get("system_fingerprint"))
    here = read_fingerprint(target.fingerprint)
    if recorded and here and recorded.architecture != here.architecture:
        why = (
            f"{line.where} cannot be compared: it was recorded on {recorded.architecture}, and "
            f"this is {here.architecture}. Equal bits are promised within one architecture, and "
            "here they differ: check it where it was recorded, or keep a golden for each"
        )
        return Verdict(name, False, False, why)
    return Verdict(name, False, True, _explained(target, compared))


def _explained(target: AnswerTarget, compared: Compared) -> str:
    line = compared.line
    assert isinstance(line.answer, BatchLine)
    request = line.answer.request
    body = {key: value for key, value in request.body.items() if key != "return_token_ids"}
    rows = [f"{line.where} is not what the model answers now", ""]
    rows += [f"  request   POST {request.url} {_short(to_json(body).decode())}"]
    first = compared.differences[0]
    if isinstance(first, Difference):
        rows += _token_rows(target, line, first)
    else:
        rows += ["  tokens    all equal, with the bits of their log-probabilities; what differs:"]
        rows += [f"            {part}" for part in compared.differences[:_PARTS]]
        if len(compared.differences) > _PARTS:
            rows += [f"            and {len(compared.differences) - _PARTS} fields more"]
    return "\n".join(rows)


def _token_rows(target: AnswerTarget, line: Line, difference: Difference) -> list[str]:
    """The place, both tokens, both log-probabilities, and the likeliest tokens of the place."""
    assert isinstance(line.answer, BatchLine)
    choice = line.answer.response.body.choices[difference.choice]
    position, recorded, computed = difference.position, difference.recorded, difference.computed
    before = choice.token_ids[:position]
    text = "".join(map(target.text, before[-_TEXT_BEFORE:]))
    where = f"token {position + 1} of {len(choice.token_ids)}"
    if len(line.choices) > 1:
        where += f" of choice {difference.choice + 1} of {len(line.choices)}"
    behind = f", behind {text!r}" if before else ", the first of the answer"
    rows = [
        f"  place     {where} (position {position}){behind}",
        f"  recorded  {_token(target, recorded)}",
        f"  computed  {_token(target, computed)}",
    ]
    if recorded and computed and recorded.id == computed.id:
        rows.append(f"            the same token; {_apart(recorded, computed)}")
    likely = target.likeliest([*choice.prompt_token_ids, *before])
    rows.append(f"  the {len(likely)} likeliest tokens at this place, as computed now:")
    for token in likely:
        marks = [
            mark
            for mark, scored in (("recorded", recorded), ("computed", computed))
            if scored and scored.id == token.token_id
        ]
        end = f"   <- {', '.join(marks)}" if marks else ""
        rows.append(f"            {token.logprob:>12.7f}  {token.token_id:>7} {token.text!r}{end}")
    return rows


def _token(target: AnswerTarget, token: Scored | None) -> str:
    if token is None:
        return "nothing: the answer has ended before"
    text = target.text(token.id)
    value = f"log-probability {token.logprob:.7f} (bits {token.bits})"
    return f"{text!r} (token {token.id}), {value}"


def _apart(recorded: Scored, computed: Scored) -> str:
    """How far two log-probabilities are from each other."""
    steps = abs(int(recorded.bits, 16) - int(computed.bits, 16))
    distance = abs(recorded.logprob - computed.logprob)
    places = "1 step of fp32" if steps == 1 else f"{steps} steps of fp32"
    return f"its log-probability is off by {distance:.3g}, {places}"


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def answer_texts(stored: Json) -> Sequence[Any]:
    """The texts of an answer's choices, of a completion or a chat."""
    choices = stored["response"]["body"]["choices"]
    return [c["text"] if "text" in c else c["message"]["content"] for c in choices]
