"""What once.py and sitecustomize.py agree on."""

import zlib

#: What a process may have open, and a number above all of theirs.
MAX_DESCRIPTORS, ABOVE = 16, 100
#: Of the line to a worker's host, and that host's pid.
LINE, PARENT = "--fd=", "--parent="
#: What a worker imports before it knows which environment it is for.
OF_WORKERS = ["quartet_envhost.v1.environment"]


def of_interpreter(prefix: str) -> str:
    """What the name of the socket ends with where workers of this interpreter are forked."""
    return f".{zlib.crc32(prefix.encode())}"
