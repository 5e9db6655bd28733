"""Seconds per round of a federation against a bare PyTorch loop that does the same work."""
