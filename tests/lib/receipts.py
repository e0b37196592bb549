"""An audit directory of answers that no model gave, written as a server writes it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tpdet.audit.receipts.keys import TrustedKey, TrustedKeys, generate_key
from tpdet.audit.receipts.statement import EndedAnswer, EndedChoice
from tpdet.audit.replay import DigestOrigin, replay_digest
from tpdet.control.row_messages import SampledToken
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import Request, SamplingParams
from tpdet.server.front.receipts import Receipts
from tpdet.server.front.tally import SharedTally
from tpdet.server.wire.process_config import AuditConfig

FACTS = EngineFacts("fp", "c0" * 32, "d1" * 32, 256, 512, (258,), 2, "fp", "float32")
BEGAN = 1790000000.0


def ended_answer(number: int = 0, prompts: int = 1, **changes) -> EndedAnswer:
    """An answer of two choices a prompt; its ids and bits follow from its number."""
    params = SamplingParams(n=2, temperature=0.5, max_tokens=3, stop="a secret stop")
    requests = tuple(
        Request(
            request_id=f"r-{number}-{prompt}",
            prompt_token_ids=(7, 8, number, prompt),
            params=params,
            eos_token_ids=(258,),
        )
        for prompt in range(prompts)
    )
    choices = tuple(
        tuple(
            EndedChoice([SampledToken(i, -0.5 * i) for i in range(number, number + 3)], "length")
            for _ in range(2)
        )
        for _ in requests
    )
    tokens = [[choice.tokens for choice in one] for one in choices]
    names = 41, FACTS.contract, FACTS.model_digest
    fields = {
        "id": f"{number:032x}",
        "owner": "",
        "outcome": "completed",
        "reason": None,
        "route": "/v1/completions",
        "facts": FACTS,
        "seed": 41,
        "requests": requests,
        "choices": choices,
        "spans": (),
        "approximate": False,
        "replay_version": 2,
        "replay_digest": replay_digest(requests, tokens, DigestOrigin(*names)),
        "began": BEGAN,
        "ended": BEGAN + number,
    }
    return EndedAnswer(**(fields | changes))


class Audited(NamedTuple):
    """An audit directory, its private key's file, and the keys file for who checks it."""

    path: Path
    key: Path
    keys: Path

    @property
    def trusted(self) -> TrustedKeys:
        return TrustedKeys.read(self.keys)

    @property
    def entry(self) -> TrustedKey:
        return self.trusted.keys[-1]

    def trust(self, **changes) -> TrustedKeys:
        """The keys with the last one changed, as an operator edits the file."""
        fields = json.loads(self.keys.read_text())
        fields["keys"][-1] |= changes
        self.keys.write_text(json.dumps(fields))
        return self.trusted

    def write(self, answers: Sequence[EndedAnswer], key: Path | str | None = None) -> None:
        """Add receipts of answers, in their order, one commit each."""
        config = AuditConfig(str(self.path), str(key or self.key), True)
        receipts = Receipts(config, None, SharedTally.alone())
        try:
            for answer in answers:
                asyncio.run(receipts.write(answer))
        finally:
            receipts.close()


def new_audited(folder: Path, answers: int = 0) -> Audited:
    """A new directory below a folder with so many receipts."""
    audited = Audited(folder / "audit", folder / "audit.key", folder / "keys.json")
    TrustedKeys((generate_key(audited.key).public,)).write(audited.keys)
    audited.write([ended_answer(number) for number in range(answers)])
    return audited
