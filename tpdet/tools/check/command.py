"""`tpdet check`: recorded answers, computed again by a model or a server."""

import argparse

from tpdet.client.commands import refuse_server
from tpdet.errors import UsageError
from tpdet.launch.host.standard_streams import print_utf8
from tpdet.tools.check.answers import read_lines
from tpdet.tools.check.report import json_lines, table_lines


def check(options: argparse.Namespace) -> int:
    """Check a file and print what differs, on rank 0: 0 if all is equal, 1 if an answer differs.

    Raises what `read_lines`, `check_by_model` and `check_by_server` raise.
    """
    if options.model is not None:
        refuse_server(options, options.model)
    elif options.tp is not None:
        raise UsageError("--tp is for a model that is loaded here: leave it out beside a server")
    lines = read_lines(options.answers)
    if options.model is None:
        from tpdet.tools.check.by_server import check_by_server

        compared, checked = check_by_server(options, lines)
    else:
        from tpdet.tools.check.by_model import check_by_model

        by_model = check_by_model(options, lines)
        if by_model is None:
            return 0  # rank 0 prints
        compared, checked = by_model
    if options.json:
        print_utf8(json_lines(compared, checked))
    else:
        for line in table_lines(compared, checked):
            print(line)
    return int(checked.different > 0)
