"""Backends: how a batch is computed. The model process imports only the selected one, through the registry."""
