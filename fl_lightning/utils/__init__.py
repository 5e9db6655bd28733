"""Helpers of every other room: keyed randomness, checks of settings, files written in one move."""
