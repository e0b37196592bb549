"""What this host knows: processes, listening sockets, files read and written with care."""
