"""Receipts of answers: each is durable before the end of a stream, or a whole answer, is sent.

A thread makes them: hashes and the signature, then the content store's commit and the log's, by the
one HTTP process that writes. All that wait for it are committed together, and the event loop goes
on meanwhile.
"""

import asyncio
import logging
import platform
import queue
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from tpdet import __version__
from tpdet.audit.log.reader import LogReader
from tpdet.audit.receipts.bundle import make_bundle
from tpdet.audit.receipts.content import ContentStore
from tpdet.audit.receipts.directory import AuditDirectory, unverified_statement
from tpdet.audit.receipts.envelope import seal
from tpdet.audit.receipts.statement import (
    EndedAnswer,
    EndedChoice,
    Outcome,
    ServerFacts,
    SignedSpan,
    content_of,
    owner_mark,
    statement_of,
)
from tpdet.audit.receipts.writer import ReceiptWriter, SealedReceipt
from tpdet.errors import AuditUnavailableError
from tpdet.requests.answer.choices import Json
from tpdet.requests.answer.whole_answer import WholeAnswer
from tpdet.requests.body.problems import from_code
from tpdet.requests.routes import path_of
from tpdet.server.front.answer_weights import AnswerWeights
from tpdet.server.front.events import ChoiceKey, Event
from tpdet.server.front.tally import SharedTally
from tpdet.server.wire.process_config import AuditConfig
from tpdet.server.wire.receipt_channel import RemoteWriter, SharedWriter
from tpdet.text.tokenizer import TokenizerFiles

MOST_TOGETHER = 1024

_log = logging.getLogger("tpdet.server")

_Waiting = tuple[EndedAnswer, "Future[None]"]


class Receipts:
    """Writes the receipts of one server. Raises as `AuditDirectory` where it cannot begin."""

    def __init__(self, config: AuditConfig, files: TokenizerFiles | None, tally: SharedTally):
        self._directory = AuditDirectory(Path(config.directory))
        self._key = self._directory.open_key(config.key)
        self._required, self._tally = config.required, tally
        self._server = _server_facts(files)
        self._writer: SharedWriter | RemoteWriter = (
            SharedWriter(ReceiptWriter(self._directory, self._key), config.others)
            if config.writer < 0
            else RemoteWriter(config.writer)
        )
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="receipts", daemon=True)
        self._thread.start()

    def begin(self, receipt_id: str, owner: str) -> "AnswerReceipt":
        """The receipt of an answer that begins."""
        return AnswerReceipt(self, receipt_id, owner)

    async def write(self, answer: EndedAnswer) -> bool:
        """Make a receipt durable; False where that failed and answers are given all the same.

        Raises ApiError (503) where it failed and receipts are required.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        self._waiting.put((answer, future))
        try:
            await asyncio.wrap_future(future)
        except Exception as error:
            self._tally.add("receipts_failed")
            _log.error("receipt %s was not made durable: %s", answer.id, error)
            if self._required:
                raise from_code(AuditUnavailableError.code, AuditUnavailableError.public) from error
            return False
        self._tally.add("receipts")
        return True

    def bundle(self, receipt_id: str, owner: str) -> bytes | None:
        """The bundle of a receipt, as JSON; None for one that is not this owner's. It reads files.

        Raises AuditUnavailableError and AuditError where they cannot be read.
        """
        store = ContentStore(self._directory.content)
        try:
            stored = store.read(receipt_id)
        finally:
            store.close()
        if stored is None or stored.leaf is None:
            return None
        log = LogReader(self._directory.log, self._directory.note_keys(self._key))
        predicate = unverified_statement(log.leaf(stored.leaf), stored.leaf).predicate
        if predicate.owner != owner_mark(receipt_id, owner):
            return None
        return make_bundle(log, stored.leaf, stored.content).encode()

    def close(self) -> None:
        """Write what waits, and give the directory back."""
        self._waiting.put(None)
        self._thread.join()
        self._writer.close()

    def _write_all(self) -> None:
        ended = False
        while not ended:
            batch = [self._waiting.get()]
            with suppress(queue.Empty):
                while len(batch) < MOST_TOGETHER:
                    batch.append(self._waiting.get_nowait())
            ended = None in batch
            waiting = [one for one in batch if one is not None]
            try:
                self._write(waiting)
            except Exception as error:
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(error)

    def _write(self, batch: Sequence[_Waiting]) -> None:
        """Sign some receipts, and have them made durable.

        Raises what concerns all whose future has no result yet.
        """
        sealed, futures = [], []
        for answer, future in batch:
            try:
                content = content_of(answer)
                leaf = seal(statement_of(answer, content, self._server), self._key)
            except Exception as error:
                future.set_exception(error)
                continue
            sealed.append(SealedReceipt(answer.id, answer.ended, content.encode(), leaf))
            futures.append(future)
        words = self._writer.write(sealed) if sealed else ()
        for future, why in zip(futures, words, strict=True):
            if why is None:
                future.set_result(None)
            else:
                future.set_exception(AuditUnavailableError(why))


class AnswerReceipt:
    """The receipt of one answer, from its beginning; nothing is written before it has a seed.

    seed: the one in use, once the engine has accepted the call. cached: the answer comes from the
    cache of answers.
    """

    seed: int | None = None
    cached = False

    def __init__(self, receipts: Receipts, receipt_id: str, owner: str) -> None:
        self.id, self._owner, self._receipts = receipt_id, owner, receipts
        self._began, self._ended = time.time(), False
        self._sent: dict[ChoiceKey, int] = {}

    def sent(self, events: Iterable[Event]) -> None:
        """Note events that were handed to the connection."""
        for event in events:
            self._sent[event.key] = event.position

    async def write(
        self,
        outcome: Outcome,
        reason: str | None,
        answer: WholeAnswer,
        weights: AnswerWeights,
        marks: Json,
    ) -> bool:
        """Make the receipt durable, the first time; whether it is. Raises as `Receipts.write`.

        reason: the code of the error that ended it. marks: what the answer says of its replay.
        """
        if self._ended or self.seed is None:
            return False
        self._ended = True
        whole = outcome in ("completed", "aborted")
        choices = tuple(
            tuple(
                EndedChoice(one.logprobs, one.finish_reason)
                if whole
                else self._cut((request_id, one.index), one.logprobs, one.finish_reason)
                for one in assembler.so_far().choices
            )
            for request_id, assembler in answer.assemblers.items()
        )
        call = answer.call
        return await self._receipts.write(
            EndedAnswer(
                id=self.id,
                owner=self._owner,
                outcome=outcome,
                reason=reason,
                route=path_of(call.route),
                facts=weights.facts,
                seed=self.seed,
                requests=call.requests,
                choices=choices,
                spans=_spans(answer, weights) if weights.mixed else (),
                approximate=bool(marks.get("approximate")),
                replay_version=call.replay_version,
                replay_digest=marks.get("replay_digest") if outcome == "completed" else None,
                began=self._began,
                ended=time.time(),
                cached=self.cached,
            )
        )

    def _cut(self, key: ChoiceKey, tokens: Sequence, finish_reason: str | None) -> EndedChoice:
        """A choice as far as it was sent."""
        count = self._sent.get(key, 0)
        return EndedChoice(tokens[:count], finish_reason if 0 < count == len(tokens) else None)


def _spans(answer: WholeAnswer, weights: AnswerWeights) -> tuple[SignedSpan, ...]:
    """Which weights computed which tokens of the choices, counted over all prompts."""
    assemblers = answer.assemblers.values()
    spans = [weights.spans(choice.weight_spans) for one in assemblers for choice in one.choices]
    return tuple(SignedSpan(choice, **one) for choice, listed in enumerate(spans) for one in listed)


def _server_facts(files: TokenizerFiles | None) -> ServerFacts:
    template = None if files is None else files.template
    return ServerFacts(
        tokenizer=None if files is None else sha256(files.text.encode()).hexdigest(),
        template=None if template is None else sha256(template.encode()).hexdigest(),
        versions={
            "tpdet": __version__,
            "torch": version("torch"),
            "python": platform.python_version(),
        },
        node=socket.gethostname(),
    )
