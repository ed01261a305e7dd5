"""Quartet's SDK: the contract (`quartet.v1`), the service kit, the clients and the `quartet` command."""

import os

# Before anything imports grpc, whose C core would tell on stderr, in lines of its own form, of every peer
# that goes away. Calls say it as errors. GRPC_VERBOSITY=INFO shows them.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
