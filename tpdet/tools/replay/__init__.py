"""`tpdet replay`: receipts are verified, and their answers computed again (docs/audit.md)."""
