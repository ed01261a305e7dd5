"""Quartet's SDK: the contract (`quartet.v1`), the service kit, the clients and the `quartet` command."""

import os

# Before anything imports grpc, whose C core would tell on stderr, in lines of its own form, of every peer
# that goes away. Calls say it as errors. GRPC_VERBOSITY=INFO shows them.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Nor what would run at each fork: the C core's handlers, of which one child in a hundred dies before it is
# another program (uvloop starts programs by fork, and a structure is compiled in one). No child goes on with
# the connections of its parent.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
