"""`tpdet generate`: answers prompts offline, with the defaults of `LLM.generate`."""

import argparse
import os
from collections.abc import Iterator
from itertools import zip_longest

from tpdet.arguments.command_line import number, whole_number
from tpdet.arguments.flags import Flag, add_command, add_flags, count, flag, switch
from tpdet.client.engine_settings import add_engine_settings, add_tp, engine_config, ranks_asked
from tpdet.errors import RequestError, UsageError
from tpdet.launch.host.standard_streams import argument_text, print_utf8
from tpdet.requests.sampling_params import RANGES, SamplingParams

_FLAGS = {name: allowed for name, allowed in RANGES.items() if allowed.flag}
_SAMPLING = ("n", "max_tokens", *_FLAGS, "seed", "ignore_eos")


_PROMPTS = (
    flag("model", "Hugging Face directory or hub name", nargs="?"),
    flag("--prompt", "may be given again",
         action="append", required=True, type=argument_text, metavar="TEXT"),
    switch("--chat", "each prompt is a user's message, in the chat template"),
    flag("--system", "with --chat: what stands before each", type=argument_text, metavar="TEXT"),
)  # fmt: skip


def add_generate(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet generate`."""
    command = add_command(
        commands,
        "generate",
        generate,
        _PROMPTS,
        usage="tpdet generate MODEL --prompt TEXT [flags]",
        description="Answer prompts offline. Sampling has the defaults of LLM.generate.",
        epilog="Settings may also stand in TPDET_ variables (TPDET_MAX_MODEL_LEN) and in the file "
        "of --config, as for tpdet serve.\n\n"
        '  tpdet generate models/smollm2 --prompt "The for statement" --temperature 0',
    )
    add_flags(command.add_argument_group("sampling"), _sampling_flags())
    add_flags(command, [switch("--json", "one JSON object a prompt")])
    add_tp(command)
    add_engine_settings(command, leave_out=("skip_tokenizer_init",))


def _sampling_flags() -> Iterator[Flag]:
    yield count("-n", "choices of each prompt", default=1)
    yield count("--max-tokens", "of each choice", default=16)
    usual = SamplingParams()
    for name, allowed in _FLAGS.items():
        kind = whole_number if isinstance(allowed.low, int) else number
        names = f"--{name.replace('_', '-')}"
        yield flag(names, allowed.flag, type=kind, default=getattr(usual, name))
    yield count("--seed", "(default: of the stream that the setting seed starts; shown by --json)")
    yield switch("--ignore-eos", "go on past the end of text")


def generate(options: argparse.Namespace) -> int:
    """Answer the prompts, in their order. Raises as `LLM` and `LLM.generate` do."""
    for name in ("system", "chat_template", "chat_template_date"):
        if getattr(options, name) is not None and not options.chat:
            raise UsageError(f"--{name.replace('_', '-')} counts with --chat only: give both")
    config, ranks = engine_config(options, os.environ), ranks_asked(options)

    import msgspec

    from tpdet import LLM

    try:
        params = SamplingParams(**{name: getattr(options, name) for name in _SAMPLING})
    except RequestError as error:
        name = error.param or ""
        flag = "-n" if name == "n" else f"--{name.replace('_', '-')}"
        raise UsageError(flag + str(error).removeprefix(name)) from None
    settings = config.model_dump(include=config.model_fields_set)
    begin = [] if options.system is None else [{"role": "system", "content": options.system}]
    with LLM(**settings, tensor_parallel_size=ranks) as llm:
        if options.chat:
            talks = [[*begin, {"role": "user", "content": text}] for text in options.prompt]
            outputs = llm.chat(talks, params)
        else:
            outputs = llm.generate(options.prompt, params)
        records = [] if llm.engine.approximate else llm.record(outputs, params)
    if os.environ.get("RANK", "0") != "0":
        return 0  # every rank has the answers; one shows them
    for output, record in zip_longest(outputs, records):
        if options.json:
            print_utf8([msgspec.json.encode(output) if record is None else record.line(output)])
        else:
            print("\n".join(choice.text for choice in output.outputs))
    return 0
