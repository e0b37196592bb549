"""`python -m tpdet` is the `tpdet` command."""

import sys

from tpdet.interpreter import leave_working_directory


def main() -> int:
    """Run the command; what it imports does not come from the working directory."""
    leave_working_directory()
    from tpdet.cli import main as command

    return command()


sys.exit(main())
