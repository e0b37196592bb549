"""`tpdet check`: computes recorded answers again, and names the first bit that differs.

tpdet check [MODEL] ANSWERS.jsonl [flags]
"""
