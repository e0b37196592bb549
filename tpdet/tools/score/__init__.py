"""`tpdet score`: the log-probability of each token of a given text, to compare with other engines.

`arguments` has the flags, `source` reads the text, `command` runs the model, `report` prints.
"""
