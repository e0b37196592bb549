"""The parser that scripts written for vLLM give to `EngineArgs.add_cli_args`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tpdet.arguments.command_line import hyphenated


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse's parser, in whose flags `_` may be written for `-`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Read `args`, those of the process if None; the namespace, and what it did not know."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([hyphenated(each) for each in given], namespace)
