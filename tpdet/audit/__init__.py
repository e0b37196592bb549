"""What names an answer's bits: receipts and replay digests."""
