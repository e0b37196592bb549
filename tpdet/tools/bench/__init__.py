"""`tpdet bench`: times the engine, a server and the kernels, each beside its floor and peer."""
