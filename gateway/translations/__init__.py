"""Other providers' request formats, translated to chats: requests, responses and events of streams."""
