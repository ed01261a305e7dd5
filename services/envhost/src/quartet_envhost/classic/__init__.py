"""Classic Verifiers (0.3): `load_environment(**args)` packages, run in workers."""
