"""The load of a chaos run: open-loop requests, batches, and a load that saturates one tier."""
