"""Turns bodies of HTTP requests into requests for the engine; large ones in other processes."""
