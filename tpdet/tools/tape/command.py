"""`tpdet tape`: record, check, show, fork."""

import argparse
import json
import sys

from tpdet.client.commands import connect
from tpdet.client.connection import Connection, HttpError, client_key
from tpdet.client.input_file import read_input
from tpdet.errors import DisagreementError, NotFoundError
from tpdet.launch.host.standard_streams import print_utf8
from tpdet.tools.check.by_server import server_facts
from tpdet.tools.check.targets import open_target
from tpdet.tools.tape.answers import read_edited, shown_answer, texts_of
from tpdet.tools.tape.check import check_tape
from tpdet.tools.tape.fork import Fork, answer_live
from tpdet.tools.tape.run import RecordedRun, check_command, tape_path
from tpdet.tools.tape.tape_file import TapeWriter, Turn, bytes_of, read_tape

_TEXT = 60
"""Characters of an answer in a list of turns."""


def record(options: argparse.Namespace) -> int:
    """Run a command against the server, and record every request and answer; its exit code.

    Raises what `server_facts`, `check_command` and `TapeWriter` raise; ResourceError where the tape
    could not be written to its end and the command did not fail.
    """
    check_command(options.command)
    connection = connect(options)
    server_facts(connection)
    date = _date(connection)
    path = tape_path(options.output)
    tape = TapeWriter(path, date)
    run = RecordedRun(connection.address, client_key(options.api_key_file), date, tape, answer_live)
    return _run(run, tape, options.command)


def fork(options: argparse.Namespace) -> int:
    """Run a command whose first turns a tape answers, and the server all others; its exit code.

    Raises DisagreementError, once the command is ended, for a request that the tape has otherwise,
    UsageError for a turn that is not there or an edit that is no answer, else as `record`.
    """
    check_command(options.command)
    source = read_tape(options.tape)
    edited = None
    if options.edit is not None:
        edit = read_input(options.edit, "give what tape show TAPE --turn K printed, edited")
        edited = read_edited(edit, options.edit)
    replay = Fork(source, options.turn, edited)
    connection = connect(options)
    server_facts(connection)
    tape = date = None
    if options.output is not None:
        date = _date(connection)
        tape = TapeWriter(tape_path(options.output), date)
    key = client_key(options.api_key_file)
    code = _run(RecordedRun(connection.address, key, date, tape, replay), tape, options.command)
    if code == 0:
        replay.check_replayed()
    return code


def check(options: argparse.Namespace) -> int:
    """Compute a tape's answers again: 0 if all are equal, 1 if one differs.

    Raises NotFoundError for a tape without answers, DisagreementError (exit code 78), after all
    else was printed, where some cannot be compared; else as `read_tape`, and the model or server.
    """
    tape = read_tape(options.tape)
    if not any(turn.is_answer for turn in tape.turns):
        raise NotFoundError(f"{options.tape} has no answer of a model: record a run that asks one")
    origins = [ids.origin for ids in tape.ids.values() if ids.body is not None]
    mode = origins[0].get("logprobs_mode") if origins else None
    with open_target(options, mode, "a tape is checked") as target:
        checked = check_tape(tape, target.compare)
    for line in checked.lines():
        print(line)
    if checked.incomparable:
        raise DisagreementError(
            f"{len(checked.incomparable)} answers cannot be compared: check them with what "
            "recorded them, or record the run again"
        )
    return int(bool(checked.different))


def show(options: argparse.Namespace) -> int:
    """Print the turns of a tape, or one answer as a JSON object. Raises as `read_tape`."""
    tape = read_tape(options.tape)
    if options.turn is None:
        print_utf8([*map(_row, tape.turns), f"tape digest {tape.digest}"])
        return 0
    turn = tape.turn(options.turn)
    answer = shown_answer(turn)
    if answer is None:
        print_utf8([bytes_of(turn.answer)])
    else:
        print_utf8([json.dumps(answer, indent=1, ensure_ascii=False).encode("utf-8", "replace")])
    return 0


def _run(run: RecordedRun, tape: TapeWriter | None, command: list[str]) -> int:
    try:
        code = run.run(command)
    finally:
        if tape is not None:
            tape.close()
    if tape is None:
        return code
    if tape.failure is not None:
        if code == 0:
            raise tape.failure
        return code
    recorded = read_tape(str(tape.path))
    without = sum(ids.body is None for ids in recorded.ids.values())
    missing = f", {without} of them without ids" if without else ""
    print(
        f"tpdet: {tape.path}: {len(recorded.turns)} turns, {len(recorded.ids)} answers{missing}; "
        f"tape digest {recorded.digest}",
        file=sys.stderr,
    )
    for ids in recorded.ids.values():
        if ids.body is None:
            print(f"tpdet: turn {ids.turn} has no ids: {ids.reason}", file=sys.stderr)
    return code


def _date(connection: Connection) -> str | None:
    """The date that the server's chat template prints, where it has one."""
    try:
        info = connection.get("/tokenizer_info")
    except HttpError:
        return None  # a server without a tokenizer
    return info.get("chat_template_date")


def _row(turn: Turn) -> str:
    """A turn in a list."""
    answer = shown_answer(turn)
    text = "" if answer is None else texts_of(answer)
    said = json.dumps(text[:_TEXT], ensure_ascii=False) if text else ""
    marks = ["no answer" if turn.status is None else str(turn.status)]
    marks += ["stream"] if turn.event_stream else []
    marks += [] if turn.ended == "whole" else [turn.ended.replace("_", " ")]
    marks += [] if turn.source == "server" else [turn.source]
    return f"{turn.turn:>4}  {turn.method} {turn.path}  {', '.join(marks)}  {said}".rstrip()
