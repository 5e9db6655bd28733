"""APFL."""
