"""Mutated inputs of every kind that reach Penstock from outside: `make fuzz`."""
