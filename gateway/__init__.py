"""The edge: authenticates, admits, holds the connection, answers. The only package that knows aiohttp's server."""
