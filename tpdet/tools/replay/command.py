"""`tpdet replay`: receipts are verified, and their answers computed again by a model."""

import argparse
from itertools import chain, islice

from tpdet.audit.receipts.keys import TrustedKeys
from tpdet.errors import DisagreementError, NotFoundError
from tpdet.launch.host.standard_streams import print_utf8
from tpdet.tools.replay.receipts import VerifiedReceipts, verified_receipts

ERASED = NotFoundError.exit_code
_TOGETHER = 256
"""Receipts that are read and computed together: so many are held in memory."""


def replay(options: argparse.Namespace) -> int:
    """Verify and compute: 0 if all is equal, 1 if an answer differs, ERASED without any content.

    A receipt of other weights or another contract is told, and is DisagreementError's code where
    no answer differs. Raises as `verified_receipts` and `open_model`.
    """
    keys = TrustedKeys.read(options.keys)
    with verified_receipts(options.path, keys, options.sample) as verified:
        if verified.total == 0 and verified.erased == 0:
            raise NotFoundError(f"{options.path} has no receipts yet: ask its server something")
        if verified.total == 0:
            print("signature and inclusion hold; all content was erased, so nothing is replayed")
            return ERASED
        return _replayed(options, verified)


def _replayed(options: argparse.Namespace, verified: VerifiedReceipts) -> int:
    """Compute what is verified, print what was found; the exit code."""
    from tpdet.tools.check.by_model import open_model, refuse_launcher
    from tpdet.tools.replay.fault import Examination
    from tpdet.tools.replay.report import json_lines, table_lines
    from tpdet.tools.replay.run import ReceiptReplay

    refuse_launcher("receipts are replayed")
    first = list(islice(verified.receipts, 1))
    receipts = chain(first, verified.receipts)
    mode = first[0].content.answers[0].logprobs_mode if first else None
    examination = Examination()
    with open_model(options, mode) as llm:
        run = ReceiptReplay(llm, examination)
        while together := list(islice(receipts, _TOGETHER)):
            run.add(together)
        examination.add_other_size(options, llm)
    summary = run.summary(verified.erased)
    if options.json:
        print_utf8(json_lines(run.findings, examination, summary))
    else:
        for line in table_lines(run.findings, examination, summary):
            print(line)
    if summary.different:
        return 1
    return DisagreementError.exit_code if summary.incomparable else 0
