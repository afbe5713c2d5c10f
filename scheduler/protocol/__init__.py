"""The queue protocol in Redis: one module for each group of scripts."""
