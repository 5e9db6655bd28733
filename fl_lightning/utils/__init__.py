"""Keyed randomness, checks of settings and files written in one move: what every other room may use."""
