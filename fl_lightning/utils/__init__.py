"""Keyed randomness and checks of settings: what every other room may use."""
