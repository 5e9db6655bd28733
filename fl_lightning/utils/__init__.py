"""Keyed randomness, checks of settings and files written in one move, for every other room."""
