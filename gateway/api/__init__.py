"""The API formats: native, OpenAI-compatible and account endpoints, as request and response bodies."""
