"""Shared by the processes of a server: messages, limits, errors as clients see them."""
