"""Spans on their way to a collector; nothing of OpenTelemetry is imported before somebody wants traces."""
