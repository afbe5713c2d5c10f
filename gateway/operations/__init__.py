"""Operation of a running gateway: health, dashboard, dashboard actions, internal endpoints."""
