"""Cells: where customers live and workers serve."""
