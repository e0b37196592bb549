"""TRL's unmodified `GRPOTrainer` with `rollout_func` and directories of weights, against a server.

    python trl_grpo.py URL MODEL ROOT STEPS [--skip-sync STEP]

Before each step the trainer's weights go below ROOT and into the server, which then samples by
`VLLMClient`. `tpdet.nn` computes the log-probabilities again, from the weights in the trainer's
memory. Prints one JSON line. Sampling is at TEMPERATURE, where TRL expects processed ones.
"""

import argparse
import hashlib
import inspect
import json
from pathlib import Path

import httpx
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

import tpdet.nn

PROMPTS = ["hello world", "a b c d", "xyz", "one two three"]
ANSWERS, TOKENS, TEMPERATURE = 4, 12, 0.7


def bits(values: list[list[float]] | torch.Tensor) -> torch.Tensor:
    """Values, fp32 numbers, as int32 in the host's memory."""
    tensor = torch.as_tensor(values, dtype=torch.float32).detach().cpu()
    return tensor.contiguous().view(torch.int32)


class Comparison:
    """Log-probabilities that a server gave, beside those of the weights in a trainer's memory."""

    def __init__(self, directory: Path) -> None:
        self.exact = tpdet.nn.load(directory)
        self.steps: list[dict] = []
        self.sampled: dict[tuple[int, ...], torch.Tensor] = {}
        self.digest = hashlib.sha256()

    def compare(
        self, model: torch.nn.Module, sequences: list[list[int]], logprobs: list[list[float]]
    ) -> None:
        """Keep how many of a step's log-probabilities are computed again to the bit."""
        sampled, recomputed = bits(logprobs), self.recompute(model, sequences)
        self.sampled = dict(zip(map(tuple, sequences), sampled, strict=True))
        equal = int((sampled == recomputed).sum())
        self.digest.update(json.dumps([sequences, logprobs]).encode())
        self.steps.append({"tokens": sampled.numel(), "recomputed": equal, "trl": 0})

    def recompute(self, model: torch.nn.Module, sequences: list[list[int]]) -> torch.Tensor:
        """Bits of the answers' log-probabilities by `tpdet.nn`, of the weights in memory."""
        self.exact.load_state_dict(model.state_dict())
        lengths = [len(sequence) for sequence in sequences]
        ids = [token for sequence in sequences for token in sequence]
        with torch.no_grad():
            scores = self.exact.log_prob(ids, lengths, temperature=TEMPERATURE)
        parts = scores.split([length - 1 for length in lengths])
        return bits(torch.stack([part[-TOKENS:] for part in parts]))

    def watch(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        """A forward hook: how many of TRL's own log-probabilities have the sampler's bits."""
        for ids, mask, scores in zip(
            kwargs["input_ids"], kwargs["attention_mask"], output.log_probs, strict=True
        ):
            own = self.sampled[tuple(ids[mask.bool()].tolist())]
            self.steps[-1]["trl"] += int((bits(scores[-TOKENS:]) == own).sum())

    def add_rewards(self, trainer: GRPOTrainer) -> None:
        """Put what the trainer logged beside each step."""
        logged = [entry for entry in trainer.state.log_history if "reward" in entry]
        for step, entry in zip(self.steps, logged, strict=True):
            step |= {"reward": entry["reward"], "grad_norm": entry["grad_norm"]}


class Rollouts(Comparison):
    """What `GRPOTrainer` calls for answers: weights to the server, answers, the comparison."""

    def __init__(self, url: str, model: Path, root: Path, skipped: int | None) -> None:
        super().__init__(model)
        self.client = VLLMClient(base_url=url, connection_timeout=30)
        self.http = httpx.Client(base_url=url, timeout=120)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.root, self.skipped = root, skipped

    def tell(self, path: str, **body: object) -> dict:
        """The answer of a control route. Raises httpx.HTTPStatusError where it refuses."""
        answer = self.http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def synchronise(self, model: torch.nn.Module, step: int) -> str:
        """Serve by the trainer's weights; the digest that the server computed of them."""
        directory = self.root / f"step-{step}"
        model.save_pretrained(directory)
        self.tell("/start_weight_update")
        self.tell("/update_weights", update_info={"weight_dir": str(directory)})
        digest = self.tell("/finish_weight_update", weight_version=f"step-{step}")["weights"]
        self.client.reset_prefix_cache()
        return digest

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict:
        """TRL's `rollout_func`: ids and log-probabilities, each prompt ANSWERS times in a row."""
        step = trainer.state.global_step
        if step != self.skipped:
            self.digest.update(self.synchronise(trainer.model, step).encode())
        prompt_ids = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        answers = self.client.generate(
            prompt_ids[::ANSWERS],
            n=ANSWERS,
            max_tokens=TOKENS,
            temperature=TEMPERATURE,
            generation_kwargs={"seed": step, "ignore_eos": True},
        )
        completion_ids = answers["completion_ids"]
        logprobs = [[top[0] for top in answer] for answer in answers["logprobs"]]
        sequences = [[*p, *c] for p, c in zip(prompt_ids, completion_ids, strict=True)]
        self.compare(trainer.model, sequences, logprobs)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


def reward(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """The share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(
    comparison: Comparison, directory: Path, root: Path, steps: int, rollout=None, **settings
) -> GRPOTrainer:
    """TRL's trainer of a model in fp32. root: where its files go; settings: of `GRPOConfig`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.register_forward_hook(comparison.watch, with_kwargs=True)
    given = {
        "output_dir": str(root / "trainer"),
        "max_steps": steps,
        "per_device_train_batch_size": ANSWERS * 2,
        "num_generations": ANSWERS,
        "max_completion_length": TOKENS,
        "temperature": TEMPERATURE,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 0,
    }
    return GRPOTrainer(
        model=model,
        args=GRPOConfig(**given | settings),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=AutoTokenizer.from_pretrained(directory),
        rollout_func=rollout,
    )


def main() -> None:
    """Train, and print what was seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model", type=Path)
    parser.add_argument("root", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--skip-sync", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rollouts = Rollouts(options.url, options.model, options.root, options.skip_sync)
    arguments = rollouts, options.model, options.root, options.steps
    trainer = trainer_of(*arguments, rollouts, use_cpu=True)
    trainer.train()
    rollouts.add_rewards(trainer)
    digest = rollouts.synchronise(trainer.model, options.steps)
    rollouts.digest.update(digest.encode())
    seen = {
        "file": hashlib.sha256(Path(inspect.getfile(GRPOTrainer)).read_bytes()).hexdigest(),
        "steps": rollouts.steps,
        "weights": digest,
        "sha256": rollouts.digest.hexdigest(),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
