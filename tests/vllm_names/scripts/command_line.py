"""Engine and sampling arguments from a command line."""

import sys

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser


def main(args: dict):
    given = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    for name, value in given.items():
        if value is not None:
            setattr(params, name, value)
    for output in llm.generate(["The for statement", "A list"], params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        assert len(output.outputs[0].token_ids) <= 5


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="answers two prompts")
    group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(group)
    group.set_defaults(model="none")
    sampling = parser.add_argument_group("Sampling parameters")
    sampling.add_argument("--max-tokens", type=int)
    sampling.add_argument("--temperature", type=float)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    line = f"--model {sys.argv[1]} --max_tokens 5 --temperature 1e-5 --max-model-len 1k"
    main(vars(parser.parse_args([*line.split(), "--no-enable-prefix-caching"])))
