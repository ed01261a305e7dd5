"""`quartet init`: a workspace to begin with. What is in `files` is written as it stands."""
