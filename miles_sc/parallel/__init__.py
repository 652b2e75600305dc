"""Where data lies: process groups, and the context-parallel layouts as index maps."""
