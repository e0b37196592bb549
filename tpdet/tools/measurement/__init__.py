"""What tools that measure share: times of GPU calls, the least time, rows, results files."""
