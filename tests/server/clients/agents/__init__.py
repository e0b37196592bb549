"""Clients of agents, recorded: what they asked, and how it is recorded again."""
