"""Results of benchmarks: records, the floors they are compared with, tables, plots."""
