"""The Open Inference Protocol (KServe v2)."""
