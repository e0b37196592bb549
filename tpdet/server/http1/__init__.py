"""HTTP/1.1 beneath the application: limits of heads, bodies and connections, request order."""
