"""The entries, one in each module."""
