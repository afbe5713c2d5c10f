"""What is measured in a run: times and counts, CPU and memory, batches, and the cost of an echo."""
