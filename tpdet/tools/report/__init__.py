"""Reports as one page for browsers, of what `tpdet verify` and `tpdet audit` found."""
