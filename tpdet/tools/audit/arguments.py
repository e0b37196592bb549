"""The flags of `tpdet audit`."""

from tpdet.arguments.command_line import html_file
from tpdet.arguments.flags import Flag, file, flag, switch
from tpdet.client.command import Command, CommandGroup

_DIRECTORY = file("directory", "what --audit-dir named", metavar="DIR")
_KEYS = file("--keys", "the keys to trust, and no others", metavar="KEYS.json", required=True)
_CHECKPOINT = file("--checkpoint", "an earlier checkpoint that the log must go on from")
_ID = flag("id", "the Tpdet-Receipt of an answer", metavar="ID")
_JSON = switch("--json", "one line of JSON")

_COMMANDS: dict[str, tuple[str, tuple[Flag, ...]]] = {
    "keygen": (
        "make a key that signs receipts, and add it to a keys file",
        (
            file("key", "new file for the private key, of mode 0600", nargs="?"),
            file("--keys", "its public key is added there (default: keys.json beside it)"),
            file("--replace", "the key takes over from those of the keys file, in the log of this "
                 "directory as it is now: stop its server first", metavar="DIR"),
            flag("--uri", "of a key in a KMS or PKCS#11 token (securesystemslib), in place of a "
                 "file"),
            file("--public", "with --uri: the public key, PEM"),
        ),
    ),
    "verify": (
        "check signatures, inclusion and consistency of a directory or a bundle",
        (
            file("path", "what --audit-dir named, or a bundle", metavar="DIR|BUNDLE"),
            _KEYS,
            _CHECKPOINT,
            _JSON,
        ),
    ),
    "report": (
        "check a directory to its end and write a page for browsers: what holds, and what not",
        (
            _DIRECTORY,
            _KEYS,
            flag("--html", "the page", type=html_file, required=True, metavar="FILE"),
            _CHECKPOINT,
            file("--replay", "what tpdet replay --json printed of this directory: it is shown too"),
            _JSON,
        ),
    ),
    "show": ("check one receipt of a directory and print it", (_DIRECTORY, _ID, _KEYS)),
    "export": (
        "write one receipt as a bundle, with all that a stranger needs",
        (
            _DIRECTORY,
            _ID,
            _KEYS,
            file("--out", "the bundle", required=True),
            _CHECKPOINT,
            switch("--without-content", "no prompt and no ids in it"),
        ),
    ),
    "erase": (
        "erase prompts, ids and salts for good; receipts and log stay valid",
        (
            _DIRECTORY,
            flag("ids", "the receipts", metavar="ID", nargs="*"),
            flag("--before", "all that ended before this day (UTC)", metavar="YYYY-MM-DD"),
            file("--answer-cache", "a server's cache of answers: what it has of the same requests "
                 "is removed too", metavar="DIR"),
            file("--batch-dir", "a server's files and batches: the lines that the receipts are of "
                 "are erased there too", metavar="DIR"),
        ),
    ),
}  # fmt: skip

AUDIT = CommandGroup(
    name="audit",
    metavar="COMMAND",
    help="check signed receipts of answers",
    description="Check signed receipts of answers, with no model and no GPU (docs/audit.md). "
    "The exit code is 0 if all\nholds, 65 for a wrong signature, receipt or log, and 66 for a "
    "receipt that holds and whose content\nwas erased.",
    epilog="  tpdet audit keygen audit.key\n  tpdet audit verify AUDIT_DIR --keys keys.json",
    commands=tuple(
        Command(name=name, run=f"tpdet.tools.audit.command:{name}", flags=flags, help=text)
        for name, (text, flags) in _COMMANDS.items()
    ),
)
