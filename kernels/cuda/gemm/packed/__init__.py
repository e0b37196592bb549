"""Products whose weight is codes and scales: they become numbers in registers (Hopper)."""
