"""`openai:URL`: an external OpenAI-compatible endpoint as a backend.

`settings` parses the URL, `client` makes calls, `availability` decides whether batches are accepted, `messages` and
`errors` translate without I/O; `requests` runs one batch, and `backend` runs several of them at a time.
"""
