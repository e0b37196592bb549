"""The engine: schedule, send the plan, run it, commit."""

from tpdet.engine.engine import Engine, EngineOutput

__all__ = ["Engine", "EngineOutput"]
