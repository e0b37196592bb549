"""Golden answers: recorded ones that tests hold a model to, bit for bit, at prefill speed.

A pytest plugin (`pytest_plugin`) and, without pytest, `tpdet golden record|check`. docs/golden.md
"""
