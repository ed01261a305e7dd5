"""Before training: whether a task can be learned from as it is."""
