"""`tpdet verify`: runs a model in many circumstances and compares every bit of the logits."""
