"""The flags of `tpdet tape`."""

from tpdet.arguments.flags import count, flag
from tpdet.client.command import SERVER, UNVERIFIED, Command, CommandGroup

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
TAPE = CommandGroup(
    name="tape",
    metavar="record|check|fork|show",
    description="A client's run on tape: recorded, computed again bit for bit, or taken "
    "another way from any turn\non (docs/agents.md). The client is any command that reads "
    "OPENAI_BASE_URL or ANTHROPIC_BASE_URL.",
    epilog="  tpdet tape record -o run.tape -- python agent.py\n"
    "  tpdet tape check run.tape --model models/smollm2 --tp 2\n"
    "  tpdet tape show run.tape --turn 3 > edited.json\n"
    "  tpdet tape fork run.tape --turn 3 --edit edited.json -- python agent.py",
    commands=(
        Command(
            name="record",
            run="tpdet.tools.tape.command:record",
            flags=_RECORD,
            help="run a command, and record every request and answer",
            usage="tpdet tape record [-o TAPE] [flags] -- COMMAND ...",
            server=SERVER,
        ),
        Command(
            name="check",
            run="tpdet.tools.tape.command:check",
            flags=(_TAPE, _MODEL),
            help="compute a tape's answers again, at prefill speed, at any size",
            usage="tpdet tape check TAPE [--url URL | --model MODEL [--tp N]] [flags]",
            server=SERVER,
            ranks=True,
            without=UNVERIFIED,
        ),
        Command(
            name="fork",
            run="tpdet.tools.tape.command:fork",
            flags=_FORK,
            help="run a command whose turns before K the tape answers, and the server the rest",
            usage="tpdet tape fork TAPE --turn K [--edit FILE] [-o TAPE] [flags] -- COMMAND ...",
            server=SERVER,
        ),
        Command(
            name="show",
            run="tpdet.tools.tape.command:show",
            flags=(_TAPE, _TURN),
            help="list the turns of a tape, or print one answer as a JSON object",
            usage="tpdet tape show TAPE [--turn K]",
        ),
    ),
)
