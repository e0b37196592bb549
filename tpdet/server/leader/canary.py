"""The canary: one fixed request, answered at start and again while idle; its bits must not change.

It takes the engine's ordinary path. A client's request ends it, so no client waits for its seat; it
is no client's request, so no count and no line of the log has it.
Each run has a cache salt of its own, so no cached prefix can stand in for computing it. An
approximate engine has none: no bit of its answers is promised.
"""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpdet.audit.pooled import PooledAssembler, pooled_digest
from tpdet.audit.replay import DigestOrigin, replay_digest
from tpdet.errors import CheckpointError
from tpdet.requests.request import PooledOutput, Request, RequestFailed, SamplingParams
from tpdet.text.outputs import RequestAssembler

if TYPE_CHECKING:
    from tpdet.engine import Engine
    from tpdet.engine.engine import EngineOutput

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 3  # of prefill, of a decode, and of one behind it
MOST_SHARE = 0.01
"""The share of an idle server's time that it takes at most: a slow model answers less often."""
SEED = 1
ID_PREFIX = "canary-"  # the HTTP process's ids begin with cmpl- and chatcmpl-

_log = logging.getLogger("tpdet.server")


class Canary:
    """Runs the request every `interval` seconds (0: never), compares, and counts mismatches.

    A model that fails the first one (NaN) is not served.
    """

    def __init__(self, engine: "Engine", interval: float) -> None:
        self._engine, self._interval = engine, interval
        self._begun_at, self._count = time.monotonic(), 0
        self._seconds = 0.0  # that the last answer took
        self._running: RequestAssembler | PooledAssembler | None = None
        self._reference: str | None = None
        self._learns = False
        self._failure = ""
        self.mismatches = 0

    @property
    def running(self) -> bool:
        """Whether its request is being answered; then no client's is."""
        return self._running is not None

    @property
    def healthy(self) -> bool:
        """Whether the model can answer, with the bits of its first answer ever since."""
        return self.mismatches == 0 and not self.failed

    @property
    def failed(self) -> bool:
        """Whether the weights in use could not answer; other weights may."""
        return bool(self._failure)

    def learn(self) -> None:
        """Compute the answer to compare with, before the server takes requests.

        Raises CheckpointError where the model gives none (NaN).
        """
        if not self._interval or self._engine.approximate:
            return
        _log.info("computing the canary's answer")
        self._try()
        _log.info("the canary's replay digest is %s", self._reference)

    def renew(self) -> None:
        """Take the answer of other weights to compare with; nothing else may run.

        They are tried whatever the interval. Raises CheckpointError as `learn`: the server is not
        healthy then, until weights come that can answer.
        """
        self.abandon()
        self._reference = None
        self._try()
        if not self._interval or self._engine.approximate:
            self._reference = None

    def forget(self) -> None:
        """Let the next run's answer be the one to compare with: other weights serve."""
        self.abandon()
        self._reference, self._failure = None, ""
        self._learns = self._interval > 0.0 and not self._engine.approximate

    def _try(self) -> None:
        self._failure = ""
        self._begin()
        while self._running is not None:
            self.take(self._engine.step())
        if self._failure:
            raise CheckpointError(
                f"the model's weights cannot answer: the canary failed with {self._failure}. "
                "Finite weights can be too large to compute with; check the checkpoint, or choose "
                "another --dtype"
            )

    def begin_if_due(self) -> None:
        """Queue the request when its time has come and the engine has nothing else to do."""
        pause = max(self._interval, self._seconds / MOST_SHARE)
        due = self._interval > 0.0 and time.monotonic() - self._begun_at >= pause
        known = self._reference is not None or self._learns
        compares = known and not self._engine.approximate
        if due and compares and not self._engine.has_work:
            self._begin()

    def abandon(self) -> None:
        """Make way for a client; the next run comes after another interval."""
        if self._running is not None:
            self._engine.abort(self._running.request.request_id)
            self._running = None

    def take(self, outputs: Sequence["EngineOutput"]) -> "list[EngineOutput]":
        """The outputs without the canary's own, which are compared once they are whole."""
        others = [o for o in outputs if not o.request_id.startswith(ID_PREFIX)]
        if len(others) == len(outputs) or self._running is None:
            return others
        for output in outputs:
            if output.request_id == self._running.request.request_id:
                if isinstance(self._running, PooledAssembler):
                    assert isinstance(output, PooledOutput | RequestFailed)
                    self._running.push(output)
                else:
                    assert not isinstance(output, PooledOutput)
                    self._running.push(output)
        if self._running.finished:
            self._seconds = time.monotonic() - self._begun_at
            if self._reference is None and self._running.failure is not None:
                self._failure = self._running.failure.code
            elif not self._running.approximate:
                self._compare(self._running)
            self._running, self._learns = None, False
        return others

    def _begin(self) -> None:
        self._begun_at = time.monotonic()
        self._count += 1
        request = canary_request(
            f"{ID_PREFIX}{self._count}",
            self._engine.model_config.vocab_size,
            self._engine.max_model_len,
        )
        pooler = self._engine.pooler
        if pooler is None:
            self._running = RequestAssembler(request, None)
        else:
            request = pooler.resolved(pooler.of(request))
            self._running = PooledAssembler(request)
        self._engine.submit(request)

    def _compare(self, found: RequestAssembler | PooledAssembler) -> None:
        digest = self._digest(found)
        if self._reference is None:
            self._reference = digest
        elif digest != self._reference:
            self.mismatches += 1
            _log.error(
                "the canary's replay digest is %s, at start it was %s: answers no longer have the "
                "same bits, the server takes no more requests; restart it",
                digest,
                self._reference,
            )

    def _digest(self, found: RequestAssembler | PooledAssembler) -> str:
        if found.failure is not None:
            return f"none, it failed with {found.failure.code}"
        runner, pooler = self._engine.runner, self._engine.pooler
        if isinstance(found, PooledAssembler):
            assert found.output is not None and pooler is not None
            names = runner.contracts.strict, runner.model_digest, pooler.digest
            return pooled_digest(found.request, found.output.values, *names)
        choices = [[choice.logprobs for choice in found.answer().choices]]
        mode, contract = self._engine.config.logprobs_mode, runner.contracts.strict
        origin = DigestOrigin(SEED, contract, runner.model_digest, logprobs_mode=mode)
        return replay_digest([found.request], choices, origin)


def canary_request(name: str, vocab_size: int, max_model_len: int) -> Request:
    """The fixed request, shortened for a small model."""
    room = max_model_len - OUTPUT_TOKENS
    length = max(1, min(PROMPT_TOKENS, room))
    return Request(
        request_id=name,
        cache_salt=name,
        prompt_token_ids=tuple((17 * place + 3) % min(vocab_size, 256) for place in range(length)),
        params=SamplingParams(
            temperature=1.0,
            seed=SEED,
            max_tokens=max(0, min(OUTPUT_TOKENS, max_model_len - length)),
            ignore_eos=True,
        ),
    )
