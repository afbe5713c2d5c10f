"""Direct mode: serving over the workers' direct endpoints while Redis is not available."""
