"""`tpdet check`: recorded answers, computed again by a model or a server."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterable

import msgspec

from tpdet.check.answers import Line, read_lines, requests_of
from tpdet.check.report import Checked, Found, json_lines, table_lines
from tpdet.check.server import check_by_server, server_facts
from tpdet.client.commands import connect, refuse_server
from tpdet.client.engine_settings import engine_config
from tpdet.llm.llm import LLM
from tpdet.llm.recorded import (
    Difference,
    RecordedAnswer,
    check_recorded,
    refuse_unverified,
)
from tpdet.server.body.prepare import Preparer
from tpdet.server.wire.protocol import Start

_DEAD_PIPE = 128 + signal.SIGPIPE
"""The exit code of a command whose reader left before the end, as shells give it."""


def check(options: argparse.Namespace) -> int:
    """Check a file and print what differs, on rank 0: 0 if all is equal, 1 if an answer differs.

    141 when the reader of the output left. Raises what `read_lines`, `Connection` and `LLM.check`
    raise.
    """
    lines = read_lines(options.answers)
    if options.model is None:
        differences, checked = _by_server(options, lines)
    else:
        refuse_server(options, options.model)
        found = _by_model(options, lines)
        if found is None:
            return 0  # rank 0 prints
        differences, checked = found
    text = json_lines if options.json else table_lines
    return _print(text(differences, checked)) or int(bool(differences))


def _by_server(options: argparse.Namespace, lines: list[Line]) -> tuple[list[Found], Checked]:
    connection = connect(options)
    model = connection.model()
    facts = server_facts(connection)
    begin = time.monotonic()
    each = check_by_server(connection, model, lines, facts)
    seconds = time.monotonic() - begin
    pairs = zip(lines, each, strict=True)
    differences = [Found(line.number, found) for line, found in pairs if found is not None]
    origin = facts["contract"], facts["weights"], facts["system_fingerprint"]
    tokens = sum(len(choice.token_ids) for line in lines for choice in line.choices)
    return differences, Checked(*origin, len(lines), tokens, len(differences), seconds)


def _by_model(options: argparse.Namespace, lines: list[Line]) -> tuple[list[Found], Checked] | None:
    """What a model that is loaded here finds; None on ranks above 0."""
    config = engine_config(options, os.environ)
    refuse_unverified(config.fixed_batch, config.approximate)
    with LLM(**config.model_dump(include=config.model_fields_set)) as llm:
        facts = _facts(llm)
        preparer = Preparer(facts, "", llm.tokenizer)
        answers: list[RecordedAnswer] = []
        places: list[tuple[Line, int]] = []  # of each answer, with its first choice in the line
        for line in lines:
            first = 0
            for answer in requests_of(line, preparer):
                origin = facts.contract, facts.model_digest
                check_recorded(answer, f"line {line.number}", *origin, facts.vocab_size)
                answers.append(answer)
                places.append((line, first))
                first += len(answer.outputs)
        begin = time.monotonic()
        each = llm.check(answers)
        seconds = time.monotonic() - begin
        rank = llm.rank
    if rank > 0:
        return None
    found: dict[int, Difference] = {}
    for (line, first), difference in zip(places, each, strict=True):
        if difference is not None:
            moved = msgspec.structs.replace(difference, choice=first + difference.choice)
            found.setdefault(line.number, moved)
    checked = Checked(
        facts.contract,
        facts.model_digest,
        facts.system_fingerprint,
        len(lines),
        sum(answer.tokens for answer in answers),
        len(found),
        seconds,
    )
    return [Found(*pair) for pair in found.items()], checked


def _facts(llm: LLM) -> Start:
    """What a server of this model would say of itself."""
    engine = llm.engine
    return Start(
        system_fingerprint=llm.system_fingerprint,
        contract=engine.runner.contracts.strict,
        model_digest=engine.runner.model_digest,
        max_model_len=engine.max_model_len,
        vocab_size=engine.model_config.vocab_size,
        eos_token_ids=engine.model_config.eos_token_ids,
        tp=engine.world.size,
        approximate_fingerprint="",
    )


def _print(lines: Iterable[str]) -> int:
    """Write lines to standard output; a reader that leaves early is no error."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _DEAD_PIPE
    return 0
