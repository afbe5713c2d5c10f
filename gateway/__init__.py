"""The gateway: serves the HTTP API, authenticates, admits requests, and sends responses."""
