"""Data-parallel training for PyTorch."""
