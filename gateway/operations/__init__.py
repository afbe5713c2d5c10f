"""Operating a running system: health, dashboard, actions and internal endpoints."""
