"""Pages for browsers: one template mechanism and one base style, for the server and for reports."""
