"""An inference request from its handler to its response: admission, waiting, streaming, recovery."""
