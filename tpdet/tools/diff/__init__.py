"""`tpdet diff A B`: where two recorded answers begin to differ. Needs no torch."""
