"""What the API says of itself: its operations in words, and the page for browsers."""
