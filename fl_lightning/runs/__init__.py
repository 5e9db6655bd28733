"""A run on disk: its folder, its table of values, its TensorBoard events."""
