"""`openai:URL`: an endpoint that somebody else runs, as a backend.

`address` and `access` say where it is and how to get in, `transport` talks to it, `probe` looks whether it is there.
`bodies`, `answers`, `growing` and `verdicts` translate, purely; `batch` runs one batch, `door` says when no batch is
wanted, and `serving` answers several of them at a time.
"""
