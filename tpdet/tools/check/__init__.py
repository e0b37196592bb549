"""`tpdet check` computes recorded answers again, and names the first bit that differs."""
