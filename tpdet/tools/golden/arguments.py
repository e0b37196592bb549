"""The flags of `tpdet golden`."""

from pathlib import Path

from tpdet.arguments.flags import flag
from tpdet.client.command import SERVER, UNVERIFIED, Command, CommandGroup

_GOLDEN = flag("golden", "a golden file, also one of pytest's", type=Path, metavar="GOLDEN.json")
_MODEL = flag("--model", "Hugging Face directory or hub name; without it a server answers")
_REQUESTS = flag(
    "-i --input-file",
    "requests as tpdet run-batch reads them; their custom_id names the goldens",
    required=True,
    metavar="REQUESTS.jsonl",
)
_COMMANDS = {
    "record": ("answer requests and keep the answers as golden ones", (_GOLDEN, _REQUESTS, _MODEL)),
    "check": ("verify golden answers as drafts, at prefill speed", (_GOLDEN, _MODEL)),
}
GOLDEN = CommandGroup(
    name="golden",
    metavar="record|check",
    description="Golden answers: recorded ones that a model or a server is held to, bit for "
    "bit. pytest has the\nfixture `golden` for them.",
    epilog="  tpdet golden record golden.json -i requests.jsonl --model models/smollm2\n"
    "  tpdet golden check golden.json --url http://host:8000",
    commands=tuple(
        Command(
            name=name,
            run=f"tpdet.tools.golden.command:{name}",
            flags=flags,
            help=text,
            server=SERVER,
            ranks=True,
            without=UNVERIFIED,
        )
        for name, (text, flags) in _COMMANDS.items()
    ),
)
