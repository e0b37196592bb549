"""A bundle: one receipt as one JSON file, with all that a stranger needs to check it.

It names no path and no server: the leaf as text, its number, the proof that leads to the root of a
signed checkpoint, and the content, unless it was erased.
"""

from pathlib import Path

import msgspec

from tpdet.audit.log.reader import LogReader
from tpdet.audit.receipts.statement import Content, read_content
from tpdet.checkpoint.model_config.json_file import read_text_file
from tpdet.errors import AuditError, CheckpointError

BUNDLE_TYPE = "urn:tpdet:receipt-bundle:v1"
MOST_BUNDLE_BYTES = 64 << 20
MOST_PROOF = 64
"""Hashes of a proof: a tree of 2**64 leaves has no longer ones."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """leaf: the envelope's JSON, byte for byte; index: which leaf of the log it is; proof: hashes
    (hex) that lead to the root of `checkpoint`, a signed note. consistency: hashes that show that
    the log of `checkpoint` goes on from the one that had `consistent_with` leaves.
    """

    bundle: str
    leaf: str
    index: int
    proof: tuple[str, ...]
    checkpoint: str
    content: Content | None
    consistency: tuple[str, ...] = ()
    consistent_with: int | None = None

    def encode(self) -> bytes:
        """The file's bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def make_bundle(
    log: LogReader, index: int, content: bytes | None, earlier: int | None = None
) -> Bundle:
    """The bundle of a leaf, under the log's latest checkpoint; earlier: leaves it had before."""
    consistency = () if earlier is None else log.consistency_proof(earlier)
    return Bundle(
        bundle=BUNDLE_TYPE,
        leaf=log.leaf(index).decode(),
        index=index,
        proof=tuple(node.hex() for node in log.inclusion_proof(index)),
        checkpoint=log.note.decode(),
        content=None if content is None else read_content(content, f"leaf {index}"),
        consistency=tuple(node.hex() for node in consistency),
        consistent_with=earlier,
    )


def read_bundle(path: Path) -> Bundle:
    """The bundle in a file. Raises NotFoundError without one, AuditError for another form."""
    try:
        remedy = "give the directory of --audit-dir, or a bundle of tpdet audit export"
        text = read_text_file(path, MOST_BUNDLE_BYTES, remedy)
    except CheckpointError as error:
        raise AuditError(f"{error}") from None
    return decode_bundle(text, str(path))


def decode_bundle(text: str | bytes, where: str) -> Bundle:
    """The bundle in some JSON. Raises AuditError for another form."""
    try:
        bundle = msgspec.json.decode(text, type=Bundle)
        for node in (*bundle.proof, *bundle.consistency):
            bytes.fromhex(node)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise AuditError(f"{where} is no bundle of tpdet audit export ({error})") from None
    if bundle.bundle != BUNDLE_TYPE:
        raise AuditError(f"{where} is a {bundle.bundle!r}, not {BUNDLE_TYPE}: use a newer tpdet")
    if (longest := max(len(bundle.proof), len(bundle.consistency))) > MOST_PROOF:
        raise AuditError(f"{where} has a proof of {longest} hashes: no tree is so deep")
    return bundle
