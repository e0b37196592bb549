"""`python -m tpdet` is the `tpdet` command."""

import sys

from tpdet.cli import main

sys.exit(main())
