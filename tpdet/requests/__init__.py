"""What a request is, for both doors: its record, its parameters and their ranges."""
