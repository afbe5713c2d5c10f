"""What an endpoint's responses say, whole and streamed. No I/O."""
