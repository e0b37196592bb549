"""The receipts that are replayed: verified ones of a bundle or a directory, or a sample of them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tpdet.audit.receipts.bundle import Bundle, make_bundle, read_bundle
from tpdet.audit.receipts.directory import AuditDirectory, unverified_statement
from tpdet.audit.receipts.keys import TrustedKeys
from tpdet.audit.receipts.statement import Content, Predicate
from tpdet.audit.receipts.verify import check_bundle, check_directory
from tpdet.errors import UsageError


class Receipt(NamedTuple):
    """A receipt that holds: its leaf, what was signed, and its content."""

    leaf: int
    predicate: Predicate
    content: Content

    @property
    def where(self) -> str:
        """What messages call it."""
        return f"receipt {self.predicate.id} (leaf {self.leaf})"

    @property
    def tokens(self) -> int:
        """Recorded tokens of all choices."""
        return sum(answer.tokens for answer in self.content.answers)

    @property
    def whole(self) -> bool:
        """Whether its answer came to its end; else what was sent is the beginning of one."""
        return self.predicate.outcome == "completed"


class VerifiedReceipts(NamedTuple):
    """What is there to replay: each is read and checked as it is asked for.

    total: their number; erased: receipts that hold, and whose content was erased.
    """

    total: int
    erased: int
    receipts: Iterator[Receipt]


@contextmanager
def verified_receipts(
    path: Path, keys: TrustedKeys, sample: int | None
) -> Iterator[VerifiedReceipts]:
    """The receipts of a bundle or a directory with content; sample: so many of them, at random.

    Raises AuditError naming the first part that does not hold, before any is handed out.
    """
    if sample is not None and sample < 1:
        raise UsageError(f"--sample {sample}: give a number of receipts, 1 or more")
    if not path.is_dir():
        if sample is not None:
            raise UsageError(f"--sample is for a directory, and {path} is a bundle: leave it out")
        receipt = _checked(read_bundle(path), keys)
        whole = [] if receipt is None else [receipt]
        yield VerifiedReceipts(len(whole), 1 - len(whole), iter(whole))
        return
    size = check_directory(path, keys).checkpoint.size
    with AuditDirectory(path).reading(keys) as (log, store):
        names = [
            unverified_statement(leaf, index).predicate.id
            for index, leaf in zip(range(size), log.leaves(), strict=False)
        ]
        stored = ((index, store.read(name)) for index, name in enumerate(names))
        there = [index for index, one in stored if one is not None and one.content is not None]
        indices = there
        if sample is not None and sample < len(there):
            # A server must not know which of its receipts are looked at.
            indices = sorted(random.SystemRandom().sample(there, sample))

        def checked() -> Iterator[Receipt]:
            for index in indices:
                one = store.read(names[index])
                content = None if one is None else one.content
                receipt = _checked(make_bundle(log, index, content), keys)
                if receipt is not None:  # it may be erased meanwhile
                    yield receipt

        yield VerifiedReceipts(len(indices), size - len(there), checked())


def _checked(bundle: Bundle, keys: TrustedKeys) -> Receipt | None:
    """The receipt of a bundle; None once its content was erased. Raises AuditError."""
    verified = check_bundle(bundle, keys)
    if bundle.content is None:
        return None
    return Receipt(verified.leaf, verified.statement.predicate, bundle.content)
