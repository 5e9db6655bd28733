"""What a run writes: its folder, checkpoints, tables of values, TensorBoard events."""
