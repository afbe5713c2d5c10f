"""A load of chats for an OpenAI-compatible server, the same for an engine and for a gateway before it.

`plan` has the loads, `connection` reads responses, `generator` sends them in closed or open loops, and `figures` sums up the
answers and what the engine recorded. One process, no task and no timer for a request.
"""
