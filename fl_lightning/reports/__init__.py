"""Runs that are read again: groups, results, tables, figures, pages."""
