"""A federation whose data stay with their owners, on Flower: the server is a fit with another engine."""
