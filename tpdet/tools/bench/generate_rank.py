"""One rank that times `LLM.generate`: `-m tpdet.tools.bench.generate_rank SPEC RESULT`."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from tpdet.errors import UsageError
from tpdet.llm.llm import LLM
from tpdet.requests.request import SamplingParams
from tpdet.tools.bench.generate_load import Sizes, time_generate
from tpdet.tools.bench.latency import engine_row
from tpdet.tools.bench.spec import BenchResult, GenerateSpec
from tpdet.tools.worlds.machine import machine
from tpdet.tools.worlds.worlds import run_rank


def main(arguments: list[str]) -> int:
    """Run every case on all ranks; rank 0 writes the rows."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=GenerateSpec)
    with LLM(**({"drafts": "off"} | spec.settings)) as llm:
        engine = llm.engine
        sizes = sizes_for(spec.sizes, engine.model_config.vocab_size, engine.max_model_len)

        def generate(prompts: list[list[int]], tokens: int) -> float:
            params = SamplingParams(
                temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - begin

        rows = tuple(
            engine_row(engine, **figure.plain()) for figure in time_generate(generate, sizes)
        )
        if llm.rank == 0:
            found = machine(engine.runner.device.type, engine.world.size)
            result = BenchResult(rows=rows, machine=found)
            Path(arguments[1]).write_bytes(msgspec.json.encode(result))
    return 0


def sizes_for(sizes: Sizes, vocabulary: int, context: int) -> Sizes:
    """The sizes with ids that the model has. Raises UsageError for sequences over its context."""
    if sizes.longest > context:
        raise UsageError(
            f"sequences of {sizes.longest} tokens are over the context of {context}: raise "
            "--max-model-len, or lower --prefill-tokens, --input or --generate"
        )
    return replace(sizes, vocabulary=min(sizes.vocabulary, vocabulary))


if __name__ == "__main__":
    sys.exit(run_rank(main))
