"""Experiments: many runs by one file or command, and the figures and tables that are made of them."""
