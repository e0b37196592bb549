"""What the forks of one process need not import any more (`forked.py`)."""

import gc

import tpdet.engine
import tpdet.serve
import tpdet.server.commands.supervised
import tpdet.server.front.process  # noqa: F401

gc.collect()
gc.freeze()  # no fork looks for garbage among them
