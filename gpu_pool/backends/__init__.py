"""Backends: how a batch is computed. The model process imports one of them, the registry names all."""
