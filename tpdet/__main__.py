"""The `tpdet` command, also as `python -m tpdet`."""

import sys

from tpdet.launch.host.interpreter import leave_working_directory


def main() -> int:
    """Run the command, none of which is imported from the working directory; its exit code."""
    leave_working_directory()
    try:
        from tpdet.cli import main as command
    except KeyboardInterrupt:  # Ctrl-C while it is imported
        print("tpdet: stopped", file=sys.stderr)
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
