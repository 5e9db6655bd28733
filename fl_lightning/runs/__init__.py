"""A run writes its folder, checkpoints, tables of values and TensorBoard events."""
