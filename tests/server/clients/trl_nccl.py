"""TRL's unmodified `GRPOTrainer` with `vllm_mode="server"`, which sends weights by NCCL.

    python -m tests.server.clients.trl_nccl URL MODEL ROOT STEPS

It wants the real `vllm` package: TRL calls its transfer of weights. vLLM 0.31 and 0.33 need NCCL
2.29.7; vLLM 0.29 takes torch 2.11's, 2.28.9. Each response that TRL's client gets is seen as it
passes, and `tpdet.nn` computes the log-probabilities again, on this GPU, from the weights in the
trainer's memory. Prints one JSON line. After STEPS the trainer's weights are one update ahead of
the server's: answers then are the control, and those after another update are not.
"""

import argparse
import base64
import hashlib
import json
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from trl import GRPOTrainer
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

from tests.server.clients.trl_grpo import ANSWERS, TEMPERATURE, TOKENS, Comparison, trainer_of

SAMPLING = {"seed": 5, "ignore_eos": True}
FILES = (
    "trl.trainer.grpo_trainer",
    "trl.generation.vllm_client",
    "trl.generation.vllm_generation",
    "vllm.distributed.weight_transfer.base",
    "vllm.distributed.weight_transfer.nccl_common",
    "vllm.distributed.weight_transfer.packed_tensor",
    "vllm.distributed.device_communicators.pynccl",
    "vllm.distributed.device_communicators.pynccl_wrapper",
    "vllm.distributed.utils",
)
"""The modules that train, ask and send; each must be its wheel's."""


def hashes() -> dict[str, str]:
    """SHA-256 by module. Raises ValueError for one that is not the file of its wheel."""
    found = {}
    for name in FILES:
        path = Path(sys.modules[name].__file__)
        package = metadata.distribution(name.split(".")[0])
        digest = hashlib.sha256(path.read_bytes())
        listed = {f.locate().resolve(): f.hash for f in package.files if f.hash is not None}
        written = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
        if listed[path.resolve()].value != written:
            raise ValueError(f"{path} is not the file of {package.name} {package.version}'s wheel")
        found[name] = digest.hexdigest()
    return found


class Observer(Comparison):
    """Sees what TRL's client gets: statuses, digests of the weights, answers to compare."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.statuses: Counter[str] = Counter()
        self.weights: list[str] = []

    def attach(self, trainer: GRPOTrainer) -> None:
        """Look at each response from now on."""
        self.trainer, self.client = trainer, trainer.vllm_generation.vllm_client
        self.client.session.hooks["response"].append(self.look)

    def look(self, response: requests.Response, **_: object) -> None:
        """A response hook of `requests`."""
        retried = [attempt.status for attempt in response.raw.retries.history]
        self.statuses.update(map(str, (response.status_code, *retried)))
        path = urlsplit(response.url).path
        if path == "/finish_weight_update":
            self.weights.append(response.json()["weights"])
            self.digest.update(self.weights[-1].encode())
        if path == "/v1/completions":
            choices = response.json()["choices"]
            sequences = [[*c["prompt_token_ids"], *c["token_ids"]] for c in choices]
            logprobs = [choice["logprobs"]["token_logprobs"] for choice in choices]
            self.compare(self.trainer.model, sequences, logprobs)

    def ask(self) -> dict:
        """Answers by the weights that the server has now, compared."""
        settings = {"n": ANSWERS, "max_tokens": TOKENS, "temperature": TEMPERATURE}
        prompts = [[5, 6, 7], [9, 8, 7, 6]]
        self.client.generate(prompts, generation_kwargs=SAMPLING, **settings)
        return self.steps.pop()


def main() -> None:
    """Train, and print what was seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model", type=Path)
    parser.add_argument("root", type=Path)
    parser.add_argument("steps", type=int)
    options = parser.parse_args()
    NCCLLibrary()  # raises what vLLM keeps to itself: it would send nothing, and the server wait
    observer = Observer(options.model)
    trainer = trainer_of(
        observer,
        options.model,
        options.root,
        options.steps,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=options.url,
        generation_kwargs=SAMPLING,
        learning_rate=3e-5,
        lr_scheduler_type="constant",  # the last update changes as much as the first
    )
    observer.attach(trainer)
    communicator: Any = observer.client.communicator
    trainer.train()
    observer.add_rewards(trainer)
    skipped = observer.ask()
    trainer.vllm_generation.sync_weights()
    sent = observer.ask()
    trainer.model.save_pretrained(options.root / "last")
    seen = {
        "files": hashes(),
        "versions": {name: metadata.version(name) for name in ("trl", "vllm", "transformers")},
        "communicator": f"{type(communicator).__name__} on {communicator.device}",
        "nccl": communicator.nccl.ncclGetVersion(),
        "steps": observer.steps,
        "skipped": skipped,
        "sent": sent,
        "statuses": observer.statuses,
        "weights": observer.weights,
        "sha256": observer.digest.hexdigest(),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
