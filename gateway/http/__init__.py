"""The HTTP server: connections, routing, request bodies, responses, errors and server-sent events."""
