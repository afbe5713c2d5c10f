"""Health of the pools: checks, what to do about each problem, and the document of `GET /internal/health`."""
