"""Request bodies: reading, memory budget, content codings, strict JSON, and large strings."""
