"""Alerts at shares of quotas: detection, storage and delivery."""
