"""What on-call does with a running system: GPUs taken out and brought back, tiers paused and resumed, one live view."""
