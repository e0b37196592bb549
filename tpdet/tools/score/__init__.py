"""`tpdet score`: the log-probability of each token of a given text, to compare with other engines.

`arguments` has the flags, `command` reads the text and runs the model, `report` prints.
"""
