"""GRPO in one process: at every step the trainer's log-probabilities are the sampler's bits.

    python -m scripts.grpo MODEL WORK STEPS     # a line a step, and one hash at the end

The reward is the share of even token ids. WORK holds the weights that the sampler loads next.
"""

import hashlib
import sys

import torch

import tpdet.nn
from tpdet import LLM, SamplingParams

PROMPTS, ANSWERS, TOKENS = [[5, 6, 7], [9, 8, 7, 6]], 4, 8


def train(directory: str, work: str, steps: int, rate: float = 1e-3) -> str:
    """Train a model; the SHA-256 of all tokens, log-probabilities and weights of all steps."""
    digest, model = hashlib.sha256(), tpdet.nn.load(directory, device="cpu").float()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with LLM(directory, device="cpu", kv_pages=16, skip_tokenizer_init=True) as llm:
        for step in range(steps):
            params = SamplingParams(n=ANSWERS, seed=step, max_tokens=TOKENS, ignore_eos=True)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            answers = [(o.prompt_token_ids, c) for o in outputs for c in o.outputs]
            sequences = [[*prompt, *choice.token_ids] for prompt, choice in answers]
            ids, lengths = [t for s in sequences for t in s], [len(s) for s in sequences]
            scores = model.log_prob(ids, lengths).split([length - 1 for length in lengths])
            learned = torch.stack([answer[-TOKENS:] for answer in scores])
            sampled = "".join(bits for _, choice in answers for bits in choice.logprob_bits)
            equal = sampled == learned.detach().numpy().astype(">f4").tobytes().hex()
            even = 1.0 - torch.tensor([choice.token_ids for _, choice in answers]) % 2
            reward = even.mean(1).view(len(PROMPTS), ANSWERS)
            advantage = (reward - reward.mean(1, keepdim=True)).view(-1, 1)
            optimizer.zero_grad()
            (-advantage * (learned - learned.detach()).exp()).mean().backward()
            optimizer.step()
            tpdet.nn.save(model, work)
            llm.engine.reload(work)
            digest.update(repr((sequences, sampled, llm.engine.weights.digest)).encode())
            print(f"step {step}: reward {reward.mean():.3f}, log-probabilities equal: {equal}")
            if not equal:
                raise SystemExit("the trainer's log-probabilities are not the sampler's")
    return digest.hexdigest()


if __name__ == "__main__":
    print(train(sys.argv[1], sys.argv[2], int(sys.argv[3])))
