"""The dashboard: its state, history and events, and the page that shows them."""
