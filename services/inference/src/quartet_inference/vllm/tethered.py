"""Ties the server of forks.py to the service that begins it, before it imports anything large.

A start that is refused is over at once, and so is the wait of whoever reads all of its output: the imports
would go on for ten seconds. Where nobody serves this does nothing.
"""

import os

from quartet.local.tether import die_with

from quartet_inference.vllm.environment import SERVING

service = os.environ.get(SERVING, "").partition("@")[0]
if service:  # ends this process, too, where the service has ended already
    die_with(int(service))
