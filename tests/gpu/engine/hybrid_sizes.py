"""Hybrids on GPUs of their own: one digest of answers by `LLM` at each number of ranks.

    python -m tests.gpu.engine.hybrid_sizes [SHAPE ...] [--tp 1,2] [--device cuda] [--results DIR]

A SHAPE is a name of `known_shapes`, with random weights, or a family of `hybrids.HYBRIDS`, whose
toy is made. 22 prompts are answered together, cold and from prefixes in the cache, in chunks of 63,
64, 65 and 1,000 tokens, and some alone; their replay digests are compared within a size and between
sizes. It ends with 1 where one differs.
"""

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

from tests.gpu.engine.bits import prompt
from tests.gpu.engine.hybrids import HYBRIDS, SIZES
from tpdet import LLM, SamplingParams
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.worlds.machine import machine

BUDGETS = (63, 64, 65, 1000)
ROOM = {"max_model_len": 2048, "max_num_seqs": 32, "kv_pages": 400, "skip_tokenizer_init": True}
SAMPLED = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    seed=7,
    max_tokens=24,
    ignore_eos=True,
    logprobs=0,
    detokenize=False,
)


BASE = prompt(900, 0)
BEGINNINGS = [BASE[:300], BASE[:600], BASE, BASE[:513], BASE[:257]]
OTHERS = [prompt(length, length) for length in (5, 64, 65, *range(17, 221, 17))]
PROMPTS = [*BEGINNINGS, BASE[:512] + prompt(90, 1), BASE[:256] + prompt(300, 2), *OTHERS]
ALONE = [BASE[: 400 + 100 * i] + prompt(50, 40 + i) for i in range(3)]


def answered(llm, prompts):
    """The replay digests of answers to `prompts` together."""
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    return [answer.replay_digest for answer in llm.generate(asked, SAMPLED, use_tqdm=False)]


def digest_of(llm, model):
    """One digest of all answers. Raises where a circumstance gives another answer."""
    expected = answered(llm, PROMPTS)
    found = {"prefix hits": (answered(llm, PROMPTS), expected)}
    policy = llm.engine.scheduler.policy
    for budget in BUDGETS:
        policy.max_num_batched_tokens = policy.mixed_step_tokens = budget
        found[f"chunks of {budget}"] = answered(llm, PROMPTS), expected
    alone = [digest for ids in ALONE for digest in answered(llm, [ids])]
    found["alone"] = alone, answered(llm, ALONE)
    if differ := [name for name, (these, those) in found.items() if these != those]:
        raise AssertionError(f"{model}: other answers by {', '.join(differ)}")
    return hashlib.sha256("".join(expected + alone).encode()).hexdigest()


def by_size(model, sizes, device):
    """The digest of a model's answers by each number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path, how = Path(folder, model), {"load_format": "dummy"}
        if model in HYBRIDS:
            make_model(path, like=model, **SIZES)
            how = {}
        else:
            write_shape(path, model)
        digests = {}
        for tp in sizes:
            with LLM(
                path, tensor_parallel_size=tp, device=device, drafts="off", **how, **ROOM
            ) as llm:
                digests[tp] = digest_of(llm, model)
            print(model, "TP", tp, digests[tp], flush=True)
        return digests


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=HYBRIDS[:2], metavar="SHAPE")
    parser.add_argument("--tp", default="1,2", help="numbers of ranks")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, help="a folder of results files")
    options = parser.parse_args()
    sizes = [*map(int, options.tp.split(","))]
    rows = []
    for model in options.models:
        digests = by_size(model, sizes, options.device)
        equal = len({*digests.values()}) == 1
        case = f"{model} by LLM, one digest at TP {options.tp}"
        rows.append({"case": case, "equal": equal, "digest": digests[sizes[0]]})
    if options.results:
        command = (
            f"python -m tests.gpu.engine.hybrid_sizes {' '.join(options.models)} --tp {options.tp}"
        )
        append_run(options.results, "bits", machine(options.device, max(sizes)), command, rows)
    return int(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
