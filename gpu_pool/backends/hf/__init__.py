"""`hf:DIR`: a model in a local directory, run by transformers; torch and transformers are imported on load."""
