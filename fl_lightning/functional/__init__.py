"""The mathematics that several papers share: pure functions on tensors and arrays."""
