"""What a trainer of one process imports, for a launcher that starts it as a fork
(quartet.local.forkserver)."""

from quartet_trainer import libraries

# A trainer sets its own number of threads once it runs.
libraries.configure(threads=1)

from quartet_trainer import assembly  # noqa: E402, F401
