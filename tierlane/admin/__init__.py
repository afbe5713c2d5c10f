"""The catalog on the command line: `tierlane tier`, `customer`, `key`, `model` and `quota`."""
