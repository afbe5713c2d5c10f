"""Other API formats, translated to a chat in OpenAI's format and back."""
