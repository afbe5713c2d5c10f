"""Direct mode: requests are served by the workers' direct endpoints while Redis is not available."""
