"""Controls: mistakes of an engine or a trainer that a comparison of log-probabilities must see.

Each returns the tokens whose log-probabilities have other bits, of which there must be some.
"""

import tempfile
from pathlib import Path

import torch

import tpdet.nn
from tests.lib.engine_harness import ask, run
from tests.nn.sampled_tokens import (
    SampledTokens,
    bits_of,
    loader,
    mismatches,
    recomputed_bits,
)


def leaf_order(model: Path, sampled: SampledTokens) -> int:
    """Leaves of the trainer's products are added in another order."""
    bits = recomputed_bits(loader(model, fold_order="sequential"), sampled, 1)
    return mismatches(bits, sampled.bits)


def library_log_softmax(model: Path, sampled: SampledTokens) -> int:
    """The right logits go through torch's log-softmax, which trainers with transformers call."""

    class Library:
        """A model with torch's log-softmax in place of ours."""

        def __init__(self, world):
            self.model = tpdet.nn.load(model, world)

        def log_prob(self, ids, lengths):
            """As `CausalLM.log_prob`."""
            parts = self.model(ids, lengths).split(lengths)
            logits = torch.cat([part[:-1] for part in parts])
            tokens = torch.tensor(ids, device=logits.device)
            following = torch.cat([part[1:] for part in tokens.split(lengths)])
            return torch.log_softmax(logits, -1).gather(1, following[:, None])[:, 0]

    return mismatches(recomputed_bits(Library, sampled, 1), sampled.bits)


def skipped_update(model: Path, sampled: SampledTokens) -> int:
    """The trainer made a step, and the engine sampled by the weights before it."""
    trained = _changed(model, "layers.1.mlp", 1.01)
    return mismatches(recomputed_bits(lambda world: trained, sampled, 1), sampled.bits)


def stale_page(model: Path, sampled: SampledTokens | None = None, reload: bool = False) -> int:
    """An engine reads prefix pages of weights before the present ones.

    reload: it gets the weights as it should, and forgets the pages, so no bit differs.
    """
    trained = _changed(model, "layers.0.self_attn.v_proj", 1.5)
    prompt = [(7 * i) % 1100 for i in range(270)]
    with tempfile.TemporaryDirectory() as folder:
        changed = str(Path(folder) / "changed")
        tpdet.nn.save(trained, changed)

        def change(engine):
            if reload:
                engine.reload(changed)
            else:
                engine.runner.loaded.loader.reload(engine.runner.model, changed, lambda: None)

        waves = [change, [ask("new", prompt, logprobs=0)]]
        result = run(model, [ask("old", prompt)], waves=waves, look=False)
    bits = [bits_of(token.logprob) for token in result.outputs["new"]]
    after = SampledTokens([tuple(prompt)], [result.tokens("new")], [bits])
    return mismatches(recomputed_bits(lambda world: trained, after, 1), after.bits)


def _changed(model: Path, part: str, factor: float):
    """The model with the parameters of a part of it multiplied."""
    trained = tpdet.nn.load(model)
    with torch.no_grad():
        for name, values in trained.named_parameters():
            if part in name:
                values.mul_(factor)
    return trained


CONTROLS = {
    "torch's log-softmax": library_log_softmax,
    "another leaf order": leaf_order,
    "a stale prefix page": stale_page,
    "a skipped update": skipped_update,
}
