"""Published traces of requests to language models, read into one form for `tierlane bench` and `tierlane simulate`."""
