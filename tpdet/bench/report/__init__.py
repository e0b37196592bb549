"""What benchmarks leave beside what they are held against: floors, results, tables, pictures."""
