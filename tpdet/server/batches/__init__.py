"""Files and batches: requests of a file that are answered while nobody else waits."""
