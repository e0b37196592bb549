"""Facts of this host: processes, listening sockets, files that are read and written safely."""
