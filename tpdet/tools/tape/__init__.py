"""`tpdet tape`: a client's run on tape, computed again, or replayed and taken another way."""
