"""The plan of a run: options, tiers, schedule, inputs and objectives."""
