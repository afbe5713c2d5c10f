"""Settings of every role: types, ranges and descriptions. `python -m tierlane.settings` prints the page for docs/."""
