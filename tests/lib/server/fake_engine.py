"""An engine without a model: the same interface, deterministic tokens, faults on demand.

`cache_salt` is the test's channel to it: "slow=SECONDS" makes every step that long while the
request runs, "nan=K" fails the request at its K-th token, "die" and "damage" end the engine, "hang"
leaves the request waiting for ever, "tenant" gives each tenant tokens of its own, "approximate=K"
makes the engine approximate from the request's K-th token on, "update=K" has other weights from the
request's K-th token on, "torn=K" makes no step behind its K-th token, as torn weights do,
"script=ID.ID.ID" gives choice 0 these tokens, and choice i those behind the first i, before any
others, and so does "text=TEXT", of which U+E000 and those after it are the ids from 256 on;
"turns=TEXT|TEXT" has such a text for each turn, one more behind every message of a tool.
"""

import math
import struct
import time
import zlib
from types import SimpleNamespace

import msgspec

from tpdet.errors import IntegrityError, OverloadedError, PeerLostError, ReloadError
from tpdet.requests.request import (
    ABORTED,
    Candidate,
    PromptOutput,
    Request,
    RequestFailed,
    TokenOutput,
    check_against_model,
)
from tpdet.requests.weight_versions import WeightVersions

IM_START = 256  # begins a message in the tests' chat templates


class FakeStatistics(msgspec.Struct, frozen=True):
    requests_running: int
    requests_waiting: int
    sequences_running: int
    pages_used: int
    pages_free: int
    preemptions: int
    aborted: int
    batches: int
    batched_rows: int


def single(value: float) -> float:
    """`value` rounded to float32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


class FakeWeights:
    """What `EngineWeights` says of weights that are whole, or torn; no update is possible."""

    state, missing = "whole", ()

    def __init__(self, versions: WeightVersions) -> None:
        self._versions = versions

    @property
    def usable(self) -> bool:
        return self.state == "whole"

    @property
    def version(self) -> str:
        return self._versions.version

    @property
    def digest(self) -> str:
        return self._versions.digest


class FakeEngine:
    damaged_after = 0  # integrity checks after which one fails; 0: never
    drift_after = 0  # answers to the canary after which all log-probabilities are wrong; 0: none

    def __init__(self, vocab_size: int, eos: int, max_model_len: int, max_queue: int, seats: int):
        self.pooler = None
        self.model_config = SimpleNamespace(
            vocab_size=vocab_size, eos_token_ids=(eos,), dtype="float32", mixture=None
        )
        self.max_model_len, self.max_queue, self.seats = max_model_len, max_queue, seats
        self.system_fingerprint, self.arithmetic = "fp_fake", SimpleNamespace(contract="c0" * 32)
        self.runner = SimpleNamespace(
            contracts=SimpleNamespace(strict="c0" * 32),
            model_digest="d1" * 32,
            tensor_digests={"lm_head.weight": "e2" * 32},
            fingerprint=lambda approximate: "fp_other",
            num_pages=8,
            state_room=None,
            device=SimpleNamespace(type="cpu"),
        )
        self.versions = WeightVersions(self.runner.model_digest)
        self.weights = FakeWeights(self.versions)
        self.frozen = False
        self.interventions = self
        self.recomputed = 0
        self.approximate, self.gauges = False, {"approximate": 0.0}
        self.close = lambda: None
        self.heartbeats = 0
        self.canaries = 0
        self.checks = 0
        modes = {"logprobs_mode": "raw_logprobs", "seed_policy": "random"}
        self.config = SimpleNamespace(model="first", **modes)
        self._aborted = 0
        self._batches = self._batched_rows = 0
        self._seeds = 1000
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._done: dict[str, dict[int, int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._running or any(r.cache_salt != "hang" for r in self._waiting.values()))

    @property
    def may_step(self) -> bool:
        return self.has_work and not self.frozen and self.weights.usable

    def freeze(self, frozen: bool, keep_keys: bool = False) -> None:
        self.frozen = frozen

    def settle(self) -> list:
        return []

    def request_ids(self) -> list[str]:
        return [*self._running, *self._waiting]

    def end(self, request_id: str) -> list:
        choices = [*self._done.get(request_id, ())]
        self.abort(request_id)
        return [
            TokenOutput(request_id, choice, -1, 0.0, finish_reason=ABORTED) for choice in choices
        ]

    def recompute(self, other_weights: bool = False) -> None:
        self.recomputed += 1

    def forget_prefixes(self) -> None:
        pass

    def submit(self, request: Request) -> int:
        check_against_model(request, self.model_config.vocab_size, self.max_model_len)
        if len(self._waiting) >= self.max_queue:
            raise OverloadedError("full")
        seed = request.params.seed
        if seed is None:  # HTTP processes give one where requests give themselves theirs
            assert self.config.seed_policy == "random"
            seed = self._seeds
            self._seeds += 1
            params = msgspec.structs.replace(request.params, seed=seed)
            request = msgspec.structs.replace(request, params=params)
        self.canaries += request.request_id.startswith("canary-")
        self._waiting[request.request_id] = request
        self._done[request.request_id] = dict.fromkeys(range(request.params.n), 0)
        return seed

    def abort(self, request_id: str, choice: int | None = None) -> None:
        choices = self._done.get(request_id)
        if choices is None:
            return
        for gone in list(choices) if choice is None else [choice]:
            choices.pop(gone, None)
        if not choices:
            self._aborted += 1
            self._forget(request_id)

    def step(self) -> list:
        for request_id, request in list(self._waiting.items()):
            if len(self._running) < self.seats and request.cache_salt != "hang":
                self._running[request_id] = self._waiting.pop(request_id)
        time.sleep(max(map(delay, self._running.values()), default=0.0))
        outputs: list = []
        self._batches += bool(self._running)
        self._batched_rows += len(self._running)
        for request in list(self._running.values()):
            self._advance(request, outputs)
        return outputs

    def heartbeat(self) -> None:
        self.heartbeats += 1

    def check_integrity(self) -> None:
        self.checks += 1
        if 0 < self.damaged_after < self.checks:
            raise IntegrityError("page 7 is held by 0x1; the version table has 0x2")

    def reload(self, model: str, tick=lambda: None) -> None:
        """Each model has a fingerprint and a digest of its own; "slow" takes its time."""
        assert not self.has_work or not self.weights.usable
        if model.startswith("bad"):
            raise ReloadError("config.json: hidden_size is 2, the model that serves has 1")
        for _ in range(60 if model.startswith("slow") else 1):
            time.sleep(0.05)
            tick()
        self._update(model)
        self.weights.state = "whole"

    def _update(self, model: str) -> None:
        self.system_fingerprint = f"fp_{model}"
        self.runner.model_digest = f"{zlib.crc32(model.encode()):08x}" * 8
        self.versions.advance(self.runner.model_digest)

    def stop_workers(self) -> None:
        pass

    def statistics(self) -> FakeStatistics:
        running = len(self._running)
        return FakeStatistics(
            running,
            len(self._waiting),
            running,
            running,
            100 - running,
            0,
            self._aborted,
            self._batches,
            self._batched_rows,
        )

    def _advance(self, request: Request, outputs: list) -> None:
        salt, request_id = request.cache_salt, request.request_id
        if salt == "die":
            raise PeerLostError("rank 1 (pid 12345) at /secret/path is gone")
        if salt == "damage":
            raise IntegrityError("page 7 is wrong")
        choices = self._done[request_id]
        for choice, position in list(choices.items()):
            if salt.startswith("nan=") and position == int(salt[4:]):
                outputs.append(RequestFailed(request_id, "numerical_error", "logits were NaN"))
                self._forget(request_id)
                return
            if position == 0 and choice == 0 and request.params.prompt_logprobs is not None:
                outputs.append(prompt_output(request, self.model_config.vocab_size))
            output = token_output(request, choice, position, self.model_config)
            if salt.startswith("approximate=") and position >= int(salt[12:].split(",")[0]):
                self.approximate, self.gauges = True, {"approximate": 1.0, "slowdown_ratio": 2.0}
            output = msgspec.structs.replace(
                output, approximate=self.approximate, weights=self.versions.number
            )
            if (
                salt.startswith("update=")
                and position == int(salt[7:].split(",")[0])
                and not choice
            ):
                self._update(f"update-{self.versions.number + 1}")
                output = msgspec.structs.replace(output, weights=self.versions.number)
            if salt.startswith("torn=") and position == int(salt[5:]):
                self.weights.state = "torn"
            if 0 < self.drift_after < self.canaries:
                output = msgspec.structs.replace(output, logprob=output.logprob - 1.0)
            outputs.append(output)
            choices[choice] = position + 1
            if output.finish_reason is not None:
                del choices[choice]
        if not choices:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        for table in (self._done, self._waiting, self._running):
            table.pop(request_id, None)


def delay(request: Request) -> float:
    salt = request.cache_salt
    return float(salt.split("slow=")[1]) if "slow=" in salt else 0.0


def draw(*key: object) -> int:
    return zlib.crc32(repr(key).encode())


def ranked(key: tuple, vocab_size: int, count: int) -> tuple[Candidate, ...]:
    first = draw(key, "top") % vocab_size
    ids = [(first + 7 * i) % vocab_size for i in range(count)]
    return tuple(Candidate(t, single(-0.1 * (i + 1))) for i, t in enumerate(ids))


def beside(key: tuple, params, vocab_size: int, count: int) -> tuple[Candidate, ...]:
    named = params.logprob_token_ids
    if not named:
        return ranked(key, vocab_size, count)
    return tuple(Candidate(t, single(-math.log1p(draw(key, t) % 1000))) for t in named)


def ids_of(text: str) -> list[int]:
    """Bytes, but for U+E000 and those after it: ids from 256 on."""
    parts = ([256 + ord(c) - 0xE000] if "\ue000" <= c < "\ue100" else c.encode() for c in text)
    return [token for part in parts for token in part]


def token_output(request: Request, choice: int, position: int, model) -> TokenOutput:
    params = request.params
    if params.max_tokens == 0:
        return TokenOutput(request.request_id, choice, -1, 0.0, (), "length")
    noise = (params.seed, choice) if params.temperature else (0, 0)
    key = (request.prompt_token_ids, *noise, position)
    if request.cache_salt == "tenant":
        key = (*key, request.tenant_salt)
    # Letters, so that every token is text: ids of the bytes a to z are given by the test model.
    token = 97 + draw(key) % 26
    if request.cache_salt.startswith("script="):
        script = request.cache_salt.removeprefix("script=").split(".")[choice:]
        token = int(script[position]) if position < len(script) else token
    if request.cache_salt.startswith("text="):
        text = ids_of(request.cache_salt.removeprefix("text="))[choice:]
        token = text[position] if position < len(text) else token
    if request.cache_salt.startswith("turns="):
        turns = request.cache_salt.removeprefix("turns=").split("|")
        prompt = "".join(map(chr, request.prompt_token_ids))
        text = ids_of(turns[prompt.count(f"{chr(IM_START)}tool\n")])[choice:]
        token = text[position] if position < len(text) else token
    if params.logit_bias:
        token = max(params.logit_bias, key=lambda i: params.logit_bias[i])
    logprob = single(-math.log1p(draw(key, "p") % 1000))
    top = beside(key, params, model.vocab_size, params.logprobs or 0)
    stop = None
    reason = None
    ends = () if params.ignore_eos else request.eos_token_ids
    if token in (*ends, *params.stop_token_ids) and position + 1 > params.min_tokens:
        reason, stop = "stop", token
    elif position + 1 >= params.max_tokens:
        reason = "length"
    return TokenOutput(request.request_id, choice, token, logprob, top, reason, stop, rank=7)


def prompt_output(request: Request, vocab_size: int) -> PromptOutput:
    ids, count = request.prompt_token_ids, request.params.prompt_logprobs or 0
    logprobs = [None, *(single(-0.25 * (i + 1)) for i in range(len(ids) - 1))]
    # A few kinds of positions: a long prompt must not hold the engine up.
    kinds = [beside((ids[:8], i), request.params, vocab_size, count) for i in range(64)]
    top = [(), *(kinds[i % 64] for i in range(len(ids) - 1))]
    ranks = [0, *range(130, 129 + len(ids))]
    for i in range(len(ids) - (request.params.prompt_logprobs_last_n or len(ids))):
        logprobs[i], top[i], ranks[i] = None, (), 0
    return PromptOutput(request.request_id, tuple(logprobs), tuple(top), tuple(ranks))
