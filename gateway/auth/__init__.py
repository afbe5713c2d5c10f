"""Authentication: API keys, JWTs, and the throttle for failed attempts."""
