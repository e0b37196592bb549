"""Queries with documents whose scores lie near each other, their rankings, and how many move."""

import random

import torch

from tests.lib.models.pooled_models import pooled

YES, NO = 17, 900
VOCABULARY = 1000


def pairs(queries, documents, seed=3):
    """Prompts of each query with each document: ids of queries stand before those of documents.

    Every second document is the one before with another first word, so that their scores are near.
    """
    draw = random.Random(seed)

    def words(least, most):
        return [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(least, most))]

    texts = [words(10, 80) for _ in range(documents)]
    texts[1::2] = [[*words(1, 1), *text[1:]] for text in texts[: documents // 2 * 2 : 2]]
    return [[*query, *text] for query in (words(8, 30) for _ in range(queries)) for text in texts]


def asked(prompts):
    """A request of each prompt for the score of two tokens."""
    return [pooled(f"s{i}", prompt, token_ids=(YES, NO)) for i, prompt in enumerate(prompts)]


def rankings(scores, documents):
    """Each query's documents, the best first, of equal ones the first: int64 [queries, D]."""
    return torch.argsort(-scores.view(-1, documents), dim=1, stable=True)


def changed(one, other):
    """Queries whose ranking differs."""
    return int((one != other).any(1).sum())


def stock_scores(model, prompts, batch, device="cpu"):
    """transformers' in bf16, padded to the left in batches: fp32 [prompts]."""
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    network, scores = network.to(device).eval(), []
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in part], device=device)
        mask = torch.tensor(
            [[0] * (width - len(one)) + [1] * len(one) for one in part], device=device
        )
        places = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = network(ids, attention_mask=mask, position_ids=places, logits_to_keep=1).logits
        two = logits[:, -1].float()
        scores.append((two[:, YES] - two[:, NO]).sigmoid().cpu())
    return torch.cat(scores)
