"""A company's proxies (http_proxy, https_proxy, all_proxy): this machine is reached by none.

gRPC is told so by its options (quartet.kit.options). What speaks HTTP on this machine reads the environment:
a worker that asks the tool servers of its environment, a client of an endpoint. Most libraries ask the proxy
for 127.0.0.1, too, where no_proxy does not name it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: As the libraries read them: names, not networks.
THIS_MACHINE: Final = ("localhost", "127.0.0.1", "::1")
#: Some libraries read the first, some the second.
EXCEPTIONS: Final = ("no_proxy", "NO_PROXY")
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})


def past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment so that this machine is reached by no proxy."""
    if not any(value and name.lower() in _PROXIES for name, value in environment.items()):
        return {}
    given = next((environment[name] for name in EXCEPTIONS if environment.get(name)), "")
    named = [one.strip() for one in given.split(",") if one.strip()]
    every = ",".join([*named, *(one for one in THIS_MACHINE if one not in named)])
    # "*" is every host, but only where it stands alone.
    return {} if named == ["*"] else dict.fromkeys(EXCEPTIONS, every)
