"""Batch formation: policy, timing, dispatcher and reaper."""
