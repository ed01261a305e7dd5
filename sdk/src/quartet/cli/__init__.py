"""The `quartet` command."""
