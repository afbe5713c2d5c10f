"""Tools that test a stack: chaos, simulation, load."""
