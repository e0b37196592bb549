"""A hybrid's answer to one prompt in every circumstance, and the digest that all have in common."""

import hashlib

import msgspec
import torch

from tests.lib.engine_harness import ask, dictate_drafts, leave_out_freely, run

VOCABULARY = 1100
LONG = torch.randint(0, 1024, (600,), generator=torch.Generator().manual_seed(8)).tolist()
TOKENS = 12
SHORT = {"max_num_batched_tokens": 1000}


def asked(prompt=LONG[:300], name="a", **params):
    return ask(name, prompt, max_tokens=TOKENS, logprobs=0, **params)


def digest(found, name="a", first=0):
    """SHA-256 over an answer and the bits of its logits from position `first` on."""
    body = hashlib.sha256(repr(found.answer(name)).encode())
    of = {position: row for (request, _, position), row in found.logits.items() if request == name}
    for position in sorted(of):
        if position >= first:
            body.update(of[position].cpu().numpy().tobytes())
    return body.hexdigest()


def drafted(model, answer, right, length, prompt=LONG[:300], tokens=TOKENS, **settings):
    """An answer with drafts in runs of `length`, whose first `right` tokens are right."""

    def dictate(sequence, most):
        output = len(sequence.tokens) - sequence.prompt_length
        told = answer[output : output + min(most, length)]
        return [(t + (i >= right)) % VOCABULARY for i, t in enumerate(told)]

    def change(engine):
        leave_out_freely(engine)
        dictate_drafts(engine, dictate)

    request = ask("a", prompt, max_tokens=tokens, logprobs=0)
    request = msgspec.structs.replace(request, drafts=((1,),))
    return run(model, [request], change=change, look=False, **settings)


BEHIND = LONG[:300] + LONG[100:400]
"""A prompt that has one page in common with `LONG`."""


def left_behind(model, **settings):
    """Answers to `LONG`, which leaves a snapshot behind, to one that leaves two, and from them on.

    "hits" has the prompt `BEHIND`, and "again" has `LONG`.
    """
    waves = [
        [asked(LONG[:300] + LONG[:260], "leaves")],
        [asked(BEHIND, "hits")],
        [asked(LONG, "again")],
    ]
    found = run(model, [asked(LONG)], waves=waves, timeout=900.0, **settings)
    assert found.hits == [0, 0, 256, 512], found.hits
    return found


def crowd(model, others=15, **settings):
    """The answer beside others, which come and go."""
    beside = [asked(LONG[i : i + 17 * i], f"other {i}") for i in range(1, 1 + others)]
    half = others // 2
    requests = [*beside[:half], asked(), *beside[half:]]
    return run(model, requests, **({"max_num_seqs": 16} | settings))


CUTS = (1, 63, 64, 65, 1000)
"""Tokens of a step, at most, in which the prompt is computed."""
