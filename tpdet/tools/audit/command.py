"""The commands of `tpdet audit`."""

import argparse
import datetime
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from tpdet.arguments.dates import date_of
from tpdet.audit.receipts.bundle import make_bundle, read_bundle
from tpdet.audit.receipts.content import ContentRow, ContentStore
from tpdet.audit.receipts.directory import AuditDirectory
from tpdet.audit.receipts.keys import (
    TrustedKey,
    TrustedKeys,
    check_installed,
    generate_key,
    public_key,
)
from tpdet.audit.receipts.statement import Content
from tpdet.audit.receipts.verify import (
    Verified,
    check_bundle,
    check_directory,
    check_note,
)
from tpdet.audit.replayed import read_replay
from tpdet.checkpoint.model_config.json_file import read_text_file
from tpdet.errors import AuditError, NotFoundError, NotPermittedError, UsageError
from tpdet.launch.host.standard_streams import print_utf8
from tpdet.server.answers.files import erase_answers
from tpdet.server.batches.store import BatchStore
from tpdet.tools.audit.page import write_page
from tpdet.tools.audit.report import WholeReport, gather

ERASED = NotFoundError.exit_code
MOST_NOTE_BYTES = 1 << 20
MOST_REPLAY_BYTES = 64 << 20
_KEYS = "keys.json"


def keygen(options: argparse.Namespace) -> int:
    """Make a key, or take the public part of one elsewhere, and add it to the keys file."""
    check_installed()
    if (options.key is None) == (options.uri is None):
        raise UsageError("name a new file for the private key, or --uri of one elsewhere")
    path = options.keys or (options.key.parent if options.key else Path()) / _KEYS
    keys = TrustedKeys.read(path) if path.exists() else TrustedKeys()
    size = 0
    if options.replace is not None:
        size = AuditDirectory(options.replace).length(keys)
    if options.uri is not None:
        key = _public_of(options.uri, options.public)
    else:
        key = generate_key(options.key).public
    added = keys.with_next(key, size) if options.replace else TrustedKeys.of((*keys.keys, key))
    try:
        added.write(path)
    except OSError as error:
        if options.key is not None:
            options.key.unlink()  # no keys file has its public key: it has signed nothing
        raise NotPermittedError(f"{path} cannot be written: {error.strerror}") from error
    begins = f", from leaf {size} on" if options.replace else ""
    print(f"key {key.keyid} is in {path}{begins}")
    return 0


def _public_of(uri: str, path: Path | None) -> TrustedKey:
    """The entry of a key whose private part is elsewhere."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    if path is None:
        raise UsageError("--uri wants --public too: the public key, as a PEM file")
    text = read_text_file(path, MOST_NOTE_BYTES, "give the public key, as a PEM file")
    try:
        return public_key(SSlibKey.from_crypto(load_pem_public_key(text.encode())), uri)
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(f"--public {path} holds no public key in PEM") from None


def verify(options: argparse.Namespace) -> int:
    """Check a directory or a bundle; ERASED for a bundle whose content was erased."""
    keys, earlier = TrustedKeys.read(options.keys), _note(options.checkpoint)
    if not options.path.is_dir():
        return _tell(check_bundle(read_bundle(options.path), keys, earlier), options.json)
    bar = sys.stderr.isatty()
    checked = check_directory(options.path, keys, earlier, _progress(bar))
    if bar:
        print(file=sys.stderr)
    head, outcomes = checked.checkpoint, dict(sorted(checked.by_outcome.items()))
    fields = {
        "receipts": head.size,
        "with_content": checked.with_content,
        "outcomes": outcomes,
        "origin": head.origin,
        "root": head.root.hex(),
    }
    if options.json:
        print_utf8([msgspec.json.encode(fields)])
        return 0
    ended = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    print(
        f"{head.size} receipts hold ({ended or 'none yet'}); {checked.with_content} have their "
        f"content\nlog {head.origin}, root {head.root.hex()}"
        + ("" if earlier is None else "\nit goes on from the earlier checkpoint")
    )
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the page of a directory, whatever fails in it; AuditError's code where something does.

    1 where all holds, and a replayed answer differs.
    """
    keys, earlier = TrustedKeys.read(options.keys), _note(options.checkpoint)
    replay = None
    if options.replay is not None:
        remedy = "give what tpdet replay --json printed"
        text = read_text_file(options.replay, MOST_REPLAY_BYTES, remedy)
        replay = read_replay(text, str(options.replay))
    bar = sys.stderr.isatty()
    whole = WholeReport(gather(options.directory, keys, earlier, _progress(bar)), replay)
    if bar:
        print(file=sys.stderr)
    write_page(options.html, whole)
    audit = whole.audit
    if options.json:
        print_utf8([msgspec.json.encode(whole)])
    else:
        print(f"{audit.verified} receipts hold, {audit.failed} do not; the page is {options.html}")
    if not audit.holds:
        return AuditError.exit_code
    return 1 if whole.different else 0


def _progress(bar: bool) -> Callable[[int, int], None]:
    return _show_progress if bar else lambda done, of: None


def show(options: argparse.Namespace) -> int:
    """Check one receipt of a directory, and print its statement and content as JSON."""
    keys = TrustedKeys.read(options.keys)
    with AuditDirectory(options.directory).reading(keys) as (log, store):
        leaf, content = AuditDirectory.locate(log, store, options.id)
        bundle = make_bundle(log, leaf, content)
    verified = check_bundle(bundle, keys)
    shown = {
        "leaf": leaf,
        "of": check_note(bundle.checkpoint.encode(), keys).size,
        "statement": verified.statement,
        "content": bundle.content,
    }
    print_utf8([msgspec.json.format(msgspec.json.encode(shown), indent=1)])
    return ERASED if verified.erased else 0


def export(options: argparse.Namespace) -> int:
    """Write one receipt of a directory as a bundle; ERASED where its content was erased."""
    keys, earlier = TrustedKeys.read(options.keys), _note(options.checkpoint)
    size = None if earlier is None else check_note(earlier, keys).size
    with AuditDirectory(options.directory).reading(keys) as (log, store):
        leaf, content = AuditDirectory.locate(log, store, options.id)
        bundle = make_bundle(log, leaf, None if options.without_content else content, size)
    check_bundle(bundle, keys, earlier)
    try:
        options.out.write_bytes(bundle.encode())
    except OSError as error:
        raise NotPermittedError(f"{options.out} cannot be written: {error.strerror}") from error
    print(f"receipt {options.id}, leaf {leaf}, is in {options.out}")
    if content is None:
        print("its content was erased: signature and inclusion hold")
    return ERASED if content is None else 0


def erase(options: argparse.Namespace) -> int:
    """Erase the content of receipts."""
    if bool(options.ids) == (options.before is not None):
        raise UsageError("name the receipts to erase, or --before a day")
    store = ContentStore(AuditDirectory(options.directory).content)
    try:
        erased = _named(options.ids, store) if options.before is None else _old(options, store)
        cached = _erase_cached(options.answer_cache, [one.content for one in erased])
        in_batches = _erase_in_batches(options.batch_dir, [one.id for one in erased])
        count = store.erase([one.id for one in erased])
    finally:
        store.close()
    print(f"the content of {count} receipt{'s' * (count != 1)} was erased")
    if options.answer_cache is not None:
        print(f"{cached} cached answer{'s' * (cached != 1)} to the same requests were removed")
    if options.batch_dir is not None:
        print(f"lines of batches that were erased: {in_batches}")
    return 0


def _named(ids: Sequence[str], store: ContentStore) -> list[ContentRow]:
    """The content of receipts, empty where it was erased. Raises NotFoundError for no receipt."""
    stored = {name: store.read(name) for name in ids}
    unknown = [name for name, one in stored.items() if one is None]
    if unknown:
        raise NotFoundError(f"there is no receipt {unknown[0]}: none was erased")
    return [ContentRow(name, 0.0, one.content or b"") for name, one in stored.items() if one]


def _old(options: argparse.Namespace, store: ContentStore) -> list[ContentRow]:
    """The content of all receipts before the day of --before."""
    day = date_of(options.before)
    if day is None:
        raise UsageError(f"--before {options.before!r} is no day: write it as 2026-01-31")
    midnight = datetime.datetime.combine(day, datetime.time(), datetime.UTC)
    return store.before(midnight.timestamp())


def _erase_cached(directory: Path | None, contents: Iterable[bytes]) -> int:
    """Remove the cached answers to what was asked; how many they were."""
    if directory is None:
        return 0
    if not directory.is_dir():
        raise NotFoundError(f"--answer-cache {directory} is no directory: none was erased")
    return sum(
        erase_answers(directory, msgspec.json.decode(one, type=Content).request_digest)
        for one in contents
        if one
    )


def _erase_in_batches(directory: Path | None, ids: Sequence[str]) -> int:
    """Erase the lines of batches that these receipts are of; how many they were."""
    if directory is None:
        return 0
    store = BatchStore(directory, lock=False)
    try:
        return store.erase(ids)
    finally:
        store.close()


def _tell(verified: Verified, as_json: bool) -> int:
    """Print what a receipt says."""
    predicate = verified.statement.predicate
    if as_json:
        fields = {"id": predicate.id, "leaf": verified.leaf, "erased": verified.erased}
        print_utf8([msgspec.json.encode(fields | {"statement": verified.statement})])
    else:
        held = "its content was erased" if verified.erased else "its content is what was signed"
        print(
            f"receipt {predicate.id} holds: leaf {verified.leaf}, {predicate.outcome}, "
            f"{sum(predicate.tokens)} tokens, {predicate.facts.ended}; {held}"
        )
    return ERASED if verified.erased else 0


def _note(path: Path | None) -> bytes | None:
    """An earlier checkpoint, as a signed note."""
    if path is None:
        return None
    if not path.exists():
        raise NotFoundError(f"--checkpoint {path} does not exist: name a checkpoint that was kept")
    with path.open("rb") as file:
        data = file.read(MOST_NOTE_BYTES + 1)
    if len(data) > MOST_NOTE_BYTES:
        raise AuditError(f"--checkpoint {path} is over {MOST_NOTE_BYTES} bytes: it is no note")
    return data


def _show_progress(done: int, of: int) -> None:
    if done % 512 == 0 or done == of:
        print(f"\r{done} of {of} receipts", end="", file=sys.stderr, flush=True)
