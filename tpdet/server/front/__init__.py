"""The HTTP process: routes, request middleware, answers, metrics."""
