"""Programs that measure, prove, plan and prepare: they import the engine, which imports none."""
