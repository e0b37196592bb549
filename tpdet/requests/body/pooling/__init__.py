"""Bodies of the routes that answer with numbers, the calls that they become, and the answers."""
