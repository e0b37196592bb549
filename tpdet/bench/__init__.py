"""`tpdet bench`: times a decode step, prefill and a mixed load, each beside its floor."""
