"""The server's settings: flags, the environment, a TOML file, keys."""
