"""The whole engine on a GPU: bits, accuracy, the prefix cache, the approximate mode."""
