"""A run of `quartet rl`, handed to SLURM."""
