"""The verbs that operate a running system, by noun, with their options."""
