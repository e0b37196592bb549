"""`tpdet diff`: the first difference of recorded answers, pair by pair."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tpdet.audit.receipts.bundle import BUNDLE_TYPE, read_bundle
from tpdet.audit.recorded import (
    ChangedPart,
    Difference,
    RecordedAnswer,
    RecordedChoice,
    Scored,
    first_difference,
)
from tpdet.errors import DisagreementError, NotFoundError, UsageError
from tpdet.launch.host.standard_streams import print_utf8
from tpdet.tools.check.answers import Line, read_lines
from tpdet.tools.check.computed import changed_parts
from tpdet.tools.worlds.lists import parse_sizes

if TYPE_CHECKING:
    from tpdet.tools.diff.traces import Located

_SHOWN = 8
"""Fields of two requests that are shown as different."""
_OF_ANSWER = ("outputs", "replay_digest", "replay_version")


class AnswerPair(msgspec.Struct, frozen=True):
    """Two answers. difference: of the first choice that differs; requests: what differs of them.

    `recorded` is the first file's, `computed` the second's.
    """

    pair: int
    first: str
    second: str
    choices: int
    tokens: int
    difference: Difference | None
    requests: tuple[ChangedPart, ...]


class _Recording(msgspec.Struct, frozen=True):
    """An answer, what was asked (other fields over HTTP), and the ids of each choice's prompt."""

    name: str
    choices: tuple[RecordedChoice, ...]
    prompts: tuple[tuple[int, ...], ...]
    origin: dict[str, Any]
    asked: dict[str, Any]
    is_http: bool = False


def diff(options: argparse.Namespace) -> int:
    """Print what differs of each pair: 0 if all tokens and bits are equal, 1 if some differ.

    Raises NotFoundError, AuditError or CheckpointError for a file that is neither, UsageError for
    other numbers of answers.
    """
    first, second = _recordings(options.first), _recordings(options.second)
    if len(first) != len(second):
        raise UsageError(
            f"{options.first} has {len(first)} answers and {options.second} {len(second)}: give "
            "files with as many"
        )
    pairs = [_compared(n, *pair) for n, pair in enumerate(zip(first, second, strict=True), 1)]
    differing = [pair for pair in pairs if pair.difference is not None]
    if options.json:
        print_utf8(msgspec.json.encode(pair) for pair in differing)
    else:
        for pair in pairs:
            for line in _text(pair):
                print(line)
        tokens = sum(pair.tokens for pair in pairs)
        print(f"{len(pairs)} pairs, {tokens} tokens: {len(differing)} differ")
    if not options.trace:
        return int(bool(differing))
    traced = (differing or pairs)[0]
    index = traced.pair - 1
    located = _traced(options, traced.difference, first[index], second[index])
    if options.json:
        print_utf8([msgspec.json.encode(located)])
    else:
        print(located)
    return int(bool(differing) or located.operation is not None)


def _traced(
    options: argparse.Namespace,
    difference: Difference | None,
    first: _Recording,
    second: _Recording,
) -> "Located":
    """The first operation that differs between two sizes, where two answers part.

    Of equal ones at the end of the first choice. Raises UsageError where there is nothing to
    compute, DisagreementError for a model of another contract or other weights.
    """
    from tpdet.tools.diff.traces import locate, trace

    if options.model is None:
        raise UsageError("--trace computes: give --model, with the weights of the answers")
    sizes = parse_sizes(options.tp)
    if len(sizes) != 2:
        raise UsageError(f"--tp {options.tp}: give two sizes, such as 1,2")
    choice = 0 if difference is None else difference.choice
    recorded = [one for one in (first, second) if choice < len(one.choices)]
    prompts = {one.prompts[choice] for one in recorded}
    if len(recorded) < 2 or len(prompts) > 1 or not (prompt := prompts.pop()):
        raise UsageError(
            "--trace computes where two answers to one prompt part, and these have other prompts, "
            "or a choice that the other lacks: give two of one request"
        )
    ids = first.choices[choice].token_ids
    end = len(ids) if difference is None else difference.position
    traces = trace(options, (*prompt, *ids[:end]), sizes)
    for report in (ranks[0] for ranks in traces):
        for one in recorded:
            theirs = one.origin["contract"], one.origin["weights"]
            if theirs != (report.contract, report.weights):
                raise DisagreementError(
                    f"{one.name} is of contract {theirs[0]} and weights {theirs[1]}, and this "
                    f"model of {report.contract} and {report.weights}: give theirs"
                )
    return locate(*([rank.operations for rank in ranks] for ranks in traces))


def _recordings(path: Path) -> list[_Recording]:
    """The answers of a file, in order; a bundle has one a prompt."""
    if not path.is_file():
        raise NotFoundError(f"{path} is no file: give a bundle or recorded answers")
    with path.open("rb") as file:
        is_bundle = BUNDLE_TYPE.encode() in file.read(200)
    if not is_bundle:
        return [_of_line(line) for line in read_lines(str(path))]
    bundle = read_bundle(path)
    if bundle.content is None:
        raise NotFoundError(f"{path} has no content, which was erased: there is no answer in it")
    return [
        _of_answer(f"prompt {number}", answer)
        for number, answer in enumerate(bundle.content.answers, 1)
    ]


def _of_answer(name: str, answer: RecordedAnswer) -> _Recording:
    asked: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
    for field in _OF_ANSWER:
        del asked[field]
    origin = {field: asked.pop(field) for field in ("contract", "weights", "logprobs_mode", "seed")}
    prompts = (answer.prompt_token_ids,) * len(answer.outputs)
    return _Recording(name, answer.outputs, prompts, origin, asked)


def _of_line(line: Line) -> _Recording:
    if isinstance(line.answer, RecordedAnswer):
        return _of_answer(line.where, line.answer)
    source = line.answer.response.body.tpdet
    names = ("contract", "weights", "logprobs_mode", "seed")
    origin = {name: getattr(source, name) for name in names}
    request = msgspec.to_builtins(line.answer.request)
    prompts = tuple(choice.prompt_token_ids for choice in line.answer.response.body.choices)
    return _Recording(line.where, line.choices, prompts, origin, request, True)


def _compared(number: int, first: _Recording, second: _Recording) -> AnswerPair:
    most = max(len(first.choices), len(second.choices))
    difference = first_difference(_padded(first.choices, most), _padded(second.choices, most))
    parts = changed_parts(first.origin, second.origin)
    if first.is_http is second.is_http:
        parts += changed_parts(first.asked, second.asked)
    return AnswerPair(
        pair=number,
        first=first.name,
        second=second.name,
        choices=most,
        tokens=sum(len(choice.token_ids) for choice in first.choices),
        difference=difference,
        requests=tuple(parts),
    )


def _padded(choices: Sequence[RecordedChoice], count: int) -> list[RecordedChoice]:
    """The choices, and empty ones behind them."""
    return [*choices, *[RecordedChoice((), ())] * (count - len(choices))]


def _text(pair: AnswerPair) -> Iterator[str]:
    """What differs of a pair, as lines; none for equal tokens and bits."""
    difference = pair.difference
    if difference is None:
        return
    yield (
        f"pair {pair.pair}: the first difference is at choice {difference.choice}, position "
        f"{difference.position}"
    )
    yield f"  A, {pair.first}: {_scored(difference.recorded)}"
    yield f"  B, {pair.second}: {_scored(difference.computed)}"
    if not pair.requests:
        yield "  contract, weights, seed and requests are equal"
    for part in pair.requests[:_SHOWN]:
        text = str(part).replace(": recorded ", ": A has ", 1).replace(", computed ", ", B ", 1)
        yield f"  asked otherwise: {text}"
    if len(pair.requests) > _SHOWN:
        yield f"  and {len(pair.requests) - _SHOWN} fields more"


def _scored(token: Scored | None) -> str:
    if token is None:
        return "the end"
    return f"token {token.id}, log-probability {token.logprob:.9g} (bits {token.bits})"
