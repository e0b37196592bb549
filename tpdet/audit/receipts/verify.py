"""Checks receipts: signatures, inclusion, consistency with an earlier checkpoint, content.

No model and no GPU is needed; whether the answer is what the model computes, `tpdet replay` says.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from tpdet.audit.log.checkpoint import LogCheckpoint, verified_checkpoint
from tpdet.audit.log.merkle import leaf_hash, verify_consistency, verify_inclusion
from tpdet.audit.log.reader import LogReader
from tpdet.audit.receipts.bundle import Bundle
from tpdet.audit.receipts.content import ContentStore
from tpdet.audit.receipts.directory import AuditDirectory, misplaced
from tpdet.audit.receipts.envelope import Opened, unseal
from tpdet.audit.receipts.keys import TrustedKeys, check_installed
from tpdet.audit.receipts.statement import Statement, check_content, read_content, read_statement
from tpdet.errors import AuditError

FUTURE_SECONDS = 300.0
"""How far a receipt's time may be ahead of the clock here."""


class Verified(NamedTuple):
    """A receipt that holds: its leaf's number, its statement, whether its content was erased."""

    leaf: int
    statement: Statement
    erased: bool


class DirectoryCheck(NamedTuple):
    """A directory that holds: its head, how many receipts have content, and how answers ended."""

    checkpoint: LogCheckpoint
    with_content: int
    by_outcome: dict[str, int]


class ReceiptCheck(NamedTuple):
    """A leaf that was checked: what it says, which key signed it, whether its content is there.

    failure: what of it does not hold; then the rest may be None, for nobody vouches for it.
    """

    leaf: int
    statement: Statement | None = None
    keyid: str | None = None
    has_content: bool = False
    failure: AuditError | None = None


def check_leaf(leaf: bytes, index: int, keys: TrustedKeys) -> Statement:
    """The statement of a leaf. Raises AuditError for a wrong signature, form, or time."""
    return _check_opened(unseal(leaf, index, keys), index)


def _check_opened(opened: Opened, index: int) -> Statement:
    statement = read_statement(opened.payload, f"leaf {index}")
    ended = statement.predicate.facts.ended
    try:
        ahead = datetime.fromisoformat(ended).timestamp() - time.time()
    except ValueError:
        raise AuditError(f"leaf {index} ended at {ended[:40]!r}, which is no time") from None
    if ahead > FUTURE_SECONDS:
        raise AuditError(
            f"leaf {index} ended at {ended}, which is {ahead:.0f} s ahead: the clock of its server "
            "or of this machine is wrong, or the receipt is"
        )
    return statement


def check_note(note: bytes, keys: TrustedKeys) -> LogCheckpoint:
    """The checkpoint in a note, by a key that may sign one of its size. Raises AuditError."""
    checkpoint = verified_checkpoint(note, keys.note_keys())
    try:
        return verified_checkpoint(note, keys.note_keys(checkpoint.size))
    except AuditError:
        raise AuditError(
            f"the checkpoint of {checkpoint.size} leaves is signed by a key that is rotated or "
            "revoked there: take one that the present key signed"
        ) from None


def check_bundle(bundle: Bundle, keys: TrustedKeys, earlier: bytes | None = None) -> Verified:
    """A bundle, by these keys alone; earlier: the note of a checkpoint that its log went on from.

    Raises AuditError naming the first part that does not hold.
    """
    check_installed()
    leaf, index = bundle.leaf.encode(), bundle.index
    statement = check_leaf(leaf, index, keys)
    checkpoint = check_note(bundle.checkpoint.encode(), keys)
    proof = [bytes.fromhex(node) for node in bundle.proof]
    if not verify_inclusion(leaf_hash(leaf), index, checkpoint.size, proof, checkpoint.root):
        raise AuditError(
            f"the proof does not lead from leaf {index} to the root of the checkpoint of "
            f"{checkpoint.size} leaves: the receipt is not in that log, or the bundle was changed"
        )
    if earlier is not None:
        _check_went_on(bundle, checkpoint, check_note(earlier, keys))
    if bundle.content is not None:
        check_content(statement, bundle.content, f"receipt {statement.predicate.id}")
    return Verified(index, statement, bundle.content is None)


def _check_went_on(bundle: Bundle, checkpoint: LogCheckpoint, old: LogCheckpoint) -> None:
    """Refuse a checkpoint whose tree does not begin with that of an older one."""
    proof = [bytes.fromhex(node) for node in bundle.consistency]
    if old.origin != checkpoint.origin:
        raise AuditError(f"the checkpoint is of {old.origin}, and the bundle's {checkpoint.origin}")
    if old.size == checkpoint.size:
        proof = []
    elif bundle.consistent_with != old.size:
        raise AuditError(
            f"the bundle has no proof that its log goes on from {old.size} leaves: export it with "
            "--checkpoint and that checkpoint"
        )
    if not verify_consistency(old.size, checkpoint.size, proof, old.root, checkpoint.root):
        raise AuditError(
            f"the log was forked: the bundle's, of {checkpoint.size} leaves, does not begin with "
            f"the {old.size} of the earlier checkpoint"
        )


def check_directory(
    path: Path,
    keys: TrustedKeys,
    earlier: bytes | None = None,
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> DirectoryCheck:
    """A whole directory: every leaf, tile and content, the head, and what the head goes on from.

    tick: called with the number of receipts checked, and of all. Raises AuditError naming the
    first part that does not hold.
    """
    check_installed()
    with AuditDirectory(path).reading(keys) as (log, store):
        head = check_note(log.note, keys)
        log.verify([] if earlier is None else [check_note(earlier, keys)])
        with_content, outcomes = 0, Counter[str]()
        for check in check_receipts(log, store, keys):
            if check.failure is not None:
                raise check.failure
            assert check.statement is not None
            with_content += check.has_content
            outcomes[check.statement.predicate.outcome] += 1
            tick(check.leaf + 1, head.size)
        return DirectoryCheck(head, with_content, dict(outcomes))


def check_receipts(
    log: LogReader, store: ContentStore, keys: TrustedKeys
) -> Iterator[ReceiptCheck]:
    """Every receipt of a log, also behind one that does not hold; the tree is `log.verify`'s."""
    indices = dict[str, int]()
    for index in range(log.checkpoint.size):
        check = ReceiptCheck(index)
        try:
            opened = unseal(log.leaf(index), index, keys)
            check = check._replace(keyid=opened.keyid)
            statement = _check_opened(opened, index)
            check = check._replace(statement=statement)
            receipt_id = statement.predicate.id
            first = indices.setdefault(receipt_id, index)
            if first != index:
                raise AuditError(
                    f"leaf {first} and leaf {index} are both receipt {receipt_id}: it was written "
                    "twice"
                )
            stored = store.read(receipt_id)
            if stored is not None and stored.leaf not in (None, index):
                raise misplaced(receipt_id, stored.leaf)
            if stored is not None and stored.content is not None:
                where = f"receipt {receipt_id} (leaf {index})"
                check = check._replace(has_content=True)
                check_content(statement, read_content(stored.content, where), where)
        except AuditError as error:
            check = check._replace(failure=error)
        yield check
