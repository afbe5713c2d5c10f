"""`hf:DIR`: a model in a local directory, run by transformers; what needs torch or transformers is imported on load."""
