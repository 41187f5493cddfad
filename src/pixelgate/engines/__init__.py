"""First floor: engine requests in, token deltas out. Knows no HTTP server."""
