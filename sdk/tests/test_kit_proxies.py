"""No proxy between a program and this machine."""

from __future__ import annotations

import pytest
from quartet.kit.proxies import past_proxies

THERE = {"HTTPS_PROXY": "http://proxy.example:3128"}


@pytest.mark.parametrize(
    "given, no_proxy",
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"no_proxy": "10.0.0.0/8, .example"}, "10.0.0.0/8,.example,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "localhost,::1"}, "localhost,::1,127.0.0.1"),
        # The libraries that read both take the first.
        ({"no_proxy": "one.example", "NO_PROXY": "two.example"}, "one.example,localhost,127.0.0.1,::1"),
    ],
)
def test_this_machine_is_among_those_that_no_proxy_is_asked_for(given: dict[str, str], no_proxy: str) -> None:
    assert past_proxies(THERE | given) == {"no_proxy": no_proxy, "NO_PROXY": no_proxy}


@pytest.mark.parametrize(
    "environment", [{}, {"http_proxy": ""}, {"no_proxy": "x"}, THERE | {"no_proxy": "*"}]
)
def test_nothing_is_added_where_nothing_goes_by_a_proxy(environment: dict[str, str]) -> None:
    assert past_proxies(environment) == {}
