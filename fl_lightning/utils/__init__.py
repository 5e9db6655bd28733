"""Helpers that know nothing of federations."""
