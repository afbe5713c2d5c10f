"""The audit: outbox entries become one row for each request; maintenance and queries of the rows."""
