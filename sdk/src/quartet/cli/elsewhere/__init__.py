"""A run shown elsewhere than in its output folder, by a process of its own that reads the folder."""
