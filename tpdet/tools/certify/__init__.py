"""`tpdet certify`: one hash for all answers of an evaluation; docs/golden.md has the recipes."""
