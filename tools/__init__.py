"""Scripts that measure, draw and check what the documents tell."""
