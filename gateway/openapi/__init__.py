"""The OpenAPI description of all endpoints and the documentation pages."""
