"""The OpenAI-compatible server: an HTTP process, and the bridge from it to the engine process."""
