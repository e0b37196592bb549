"""Exchanges: how ranks send each other sums, columns and rows, and what adds them in order."""
