"""The cache of answers, as the HTTP process asks it: by request digest, salt and owner.

Sampled requests without a seed are never found, for their digest names a seed that is drawn later.
Nor are those that ask for more of a token than its log-probability, or bring drafts: they want to
be computed.
"""

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec

from tpdet.audit.replay import VERSION, AnswerDigests, DigestOrigin, draws_noise, request_digest
from tpdet.requests.answer.whole_answer import WholeAnswer
from tpdet.requests.body.prepare import Call
from tpdet.requests.engine_facts import EngineFacts
from tpdet.server.answers.files import AnswerFiles, AnswerName
from tpdet.server.answers.stored import StoredAnswer, StoredOutputs
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.pace import Turns
from tpdet.text.tokenizer import Tokenizer

HIT, MISS, BYPASS = "hit", "miss", "bypass"
_STATUS = {HIT: b"tpdet; hit", MISS: b"tpdet; fwd=miss", BYPASS: b"tpdet; fwd=bypass"}


@dataclass(frozen=True)
class AnswerCache:
    """Finds and keeps the answers of one server."""

    files: AnswerFiles
    client: EngineClient
    tokenizer: Tokenizer | None

    async def asked(self, call: Call, owner: str, directives: str, turns: Turns) -> "CachedCall":
        """A call with its stored answer, if there is one; directives: its Cache-Control."""
        directives = directives.lower().replace(" ", "")
        facts, result, source = self.client.facts, BYPASS, None
        asked = {*directives.split(",")}
        if facts is not None and self._may_be_stored(call, facts) and not asked & _FRESH:
            source = await self._found(call, owner, facts, turns)
            result = MISS if source is None else HIT
        self.client.metrics.answer_cache(result)
        kept = "no-store" not in asked and call.replay_version == VERSION
        return CachedCall(self, owner, source, _STATUS[result], kept and not _experts(facts))

    async def read(self, name: AnswerName) -> tuple[StoredAnswer, bytes] | None:
        """A stored answer and its bytes; None if there is none that can be read."""
        content = await asyncio.to_thread(self.files.read, name)
        if content is None:
            return None
        try:
            stored = _decoder.decode(content)
        except (msgspec.DecodeError, ValueError):
            stored = None
        if stored is None or stored.request_digest != name.request_digest:
            await asyncio.to_thread(self.files.remove, name)
            return None
        return stored, content

    def _may_be_stored(self, call: Call, facts: EngineFacts) -> bool:
        requests, params = call.requests, call.requests[0].params
        unseeded = draws_noise(params) and any(one.params.seed is None for one in requests)
        # Whether weights are whole, and requests taken, is the engine's to say.
        accepting = self.client.state == "accepting"
        computed = any(one.drafts for one in requests) or _experts(facts)
        return accepting and not unseeded and not computed

    async def _found(
        self, call: Call, owner: str, facts: EngineFacts, turns: Turns
    ) -> StoredOutputs | None:
        if not _has_all(call):
            return None
        first, *_ = call.requests
        names, mode = (facts.contract, facts.model_digest), facts.logprobs_mode
        origin = DigestOrigin(first.params.seed or 0, *names, logprobs_mode=mode)
        digest = request_digest(call.requests, origin)
        name = AnswerName(digest, first.cache_salt, owner)
        entry = await self.read(name)
        if entry is None:
            return None
        stored, _ = entry
        if not await asyncio.to_thread(stored.fits, call, self.tokenizer):
            await asyncio.to_thread(self.files.remove, name)
            return None
        return StoredOutputs(call, stored, facts, turns)


@dataclass(frozen=True)
class CachedCall:
    """A call that the cache was asked for. `source`: its stored outputs; `status`: as RFC 9211."""

    cache: AnswerCache
    owner: str
    source: StoredOutputs | None
    status: bytes
    kept: bool

    async def keep(
        self, whole: WholeAnswer, digests: AnswerDigests, seed: int, facts: EngineFacts
    ) -> None:
        """Store a complete answer that can be replayed; seed: its first prompt's."""
        if self.source is not None or not self.kept:
            return
        name = AnswerName(digests.request, whole.call.requests[0].cache_salt, self.owner)

        def write() -> None:
            answer = StoredAnswer.of(whole, digests, seed, facts)
            with contextlib.suppress(UnicodeEncodeError):  # of half a surrogate pair in a request
                self.cache.files.write(name, msgspec.json.encode(answer))

        await asyncio.to_thread(write)


_FRESH = {"no-cache", "no-store"}
_decoder = msgspec.json.Decoder(StoredAnswer)


def _has_all(call: Call) -> bool:
    """Whether ids, and their log-probabilities, are all that an answer shows of its tokens."""
    params = call.requests[0].params
    ranks = call.kind == "tokens" and call.logprobs is not None
    return not (params.logprobs or params.logprob_token_ids or ranks) and (
        params.prompt_logprobs is None
    )


def _experts(facts: EngineFacts | None) -> bool:
    """Whether answers hold the experts of their tokens."""
    return facts is not None and facts.experts_shape != (0, 0)
