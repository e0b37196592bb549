"""`tpdet quantise`: a dense checkpoint in fewer bits, by a written rule without calibration."""
