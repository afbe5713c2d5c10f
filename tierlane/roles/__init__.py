"""The composition root of each role: settings come in, plain values go down, one process comes out."""
