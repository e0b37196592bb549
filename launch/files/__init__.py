"""Files that are read without surprise and written whole."""
