"""An inference request, from its handler to its response: admission, pending requests, streaming, recovery."""
