"""Asynchronous jobs: submission, results, reconciliation and webhooks."""
