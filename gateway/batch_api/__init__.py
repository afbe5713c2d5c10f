"""OpenAI's batch API: files, batches, and the loop that runs the lines of batches."""
