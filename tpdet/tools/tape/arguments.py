"""The flags of `tpdet tape`."""

import argparse

from tpdet.arguments.flags import Flag, add_command, count, flag, later
from tpdet.client.arguments import add_server
from tpdet.client.engine_settings import add_engine_settings, add_tp

_TAPE = flag("tape", "what tpdet tape record wrote", metavar="TAPE")
_COMMAND = flag("command", "what to run, behind --", nargs="+", metavar="COMMAND")
_OUTPUT = "the new tape, of mode 0600; no file is written over"
_MODEL = flag("--model", "Hugging Face directory or hub name; without it a server answers")
_TURN = count("--turn", "its number on the tape, from 1", metavar="K")
_RECORD = (flag("-o --output", f"{_OUTPUT} (default run.tape)", metavar="TAPE"), _COMMAND)
_FORK = (
    _TAPE,
    count("--turn", "the first turn that the tape does not answer, from 1", required=True,
          metavar="K"),
    flag("--edit", "the answer of turn K: what tape show TAPE --turn K printed, edited; without it "
         "the server answers", metavar="FILE"),
    flag("-o --output", f"{_OUTPUT} (default: the run is not recorded)", metavar="TAPE"),
    _COMMAND,
)  # fmt: skip
_COMMANDS: dict[str, tuple[str, tuple[Flag, ...], str]] = {
    "record": (
        "run a command, and record every request and answer",
        _RECORD,
        "tpdet tape record [-o TAPE] [flags] -- COMMAND ...",
    ),
    "check": (
        "compute a tape's answers again, at prefill speed, at any size",
        (_TAPE, _MODEL),
        "tpdet tape check TAPE [--url URL | --model MODEL [--tp N]] [flags]",
    ),
    "fork": (
        "run a command whose turns before K the tape answers, and the server the rest",
        _FORK,
        "tpdet tape fork TAPE --turn K [--edit FILE] [-o TAPE] [flags] -- COMMAND ...",
    ),
    "show": (
        "list the turns of a tape, or print one answer as a JSON object",
        (_TAPE, _TURN),
        "tpdet tape show TAPE [--turn K]",
    ),
}


def add_tape(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet tape` and its commands."""
    tape = commands.add_parser(
        "tape",
        description="A client's run on tape: recorded, computed again bit for bit, or taken "
        "another way from any turn\non (docs/agents.md). The client is any command that reads "
        "OPENAI_BASE_URL or ANTHROPIC_BASE_URL.",
        epilog="  tpdet tape record -o run.tape -- python agent.py\n"
        "  tpdet tape check run.tape --model models/smollm2 --tp 2\n"
        "  tpdet tape show run.tape --turn 3 > edited.json\n"
        "  tpdet tape fork run.tape --turn 3 --edit edited.json -- python agent.py",
    )
    group = tape.add_subparsers(required=True, metavar="record|check|fork|show")
    for name, (text, flags, usage) in _COMMANDS.items():
        command = add_command(
            group,
            name,
            later("tpdet.tools.tape.command", name),
            flags,
            help=text,
            usage=usage,
            description=f"{text[:1].upper()}{text[1:]}.",
        )
        if name != "show":
            add_server(command, named=False)
        if name == "check":
            add_tp(command)
            add_engine_settings(command, leave_out=("share_draws", "fixed_batch", "approximate"))
