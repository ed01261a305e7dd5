"""What the embedded engine's service imports, for a launcher that starts it as a fork
(quartet.local.forkserver)."""

from quartet_inference.embedded import libraries

# The service sets its own number of threads once it runs.
libraries.configure(threads=1)

from quartet_inference import app  # noqa: E402, F401
