"""`openai:URL`: an endpoint that somebody else runs, as a backend.

`settings` says where it is, `client` calls it, `availability` says whether it takes batches, `messages` and `errors`
translate, purely; `requests` runs one batch, and `backend` runs several of them at a time.
"""
