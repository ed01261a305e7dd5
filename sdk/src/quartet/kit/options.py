"""The one list of gRPC channel and server options. Nothing else in Quartet sets any.

1. No message is larger than MAX_MESSAGE_BYTES in either direction; what may grow is streamed.
2. A frozen or vanished peer is found within about 30 s on an open call. The HTTP/2 ping timeout is what
   finds a frozen one: the keepalive timeout alone waits for gRPC's default of 60 s.
3. Two servers never share a port, and no proxy stands between two services.
4. How many RPCs a server takes is its interceptor's to say, with a typed refusal: a burst that comes while
   its loop is busy waits in gRPC's core.
5. A listener holds at most MAX_CONNECTIONS, silent ones and those without a token among them. Of more, each
   is closed as soon as it is accepted, and who called tries again.
"""

from __future__ import annotations

from typing import Final

Options = tuple[tuple[str, int | str], ...]

# A bound against memory exhaustion, and what one event loop parses without stalling the others.
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024

KEEPALIVE_TIME_MS: Final = 20_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000
# Servers accept pings this often; the default of 300 s would answer our keepalives with GOAWAY
# too_many_pings.
MIN_PING_INTERVAL_MS: Final = 10_000
# The default of 120 s would leave a restarted service unseen for two minutes.
MAX_RECONNECT_BACKOFF_MS: Final = 5_000
FIRST_RECONNECT_BACKOFF_MS: Final = 200
# An attempt to connect has so long, up to the peer's first frame: to a distant peer with TLS four roundtrips,
# and a lost first packet is sent again after one second, and after three. The default of 20 s would let TCP
# wait so long between two tries that a way that is open again stayed unseen.
CONNECT_TIMEOUT_MS: Final = 5_000
# The name of a peer that is not reached is looked up again so often. By the default of 30 s a service that
# has another address now (its pod was rescheduled) stayed unseen for as long as that. A look that finds no
# address is another matter: gRPC waits 1.6 times longer after each, up to two minutes, whatever is said here:
# another channel looks at once (rotating_channel.py).
MIN_LOOKUP_INTERVAL_MS: Final = 5_000
# RPCs that the core holds for a busy event loop: twice what any service takes at once. Beyond its own default
# of 1000 it begins to reset some at random, with a bare CANCELLED.
MAX_PENDING_RPCS: Final = 8192
# Each is a descriptor, of which a service has some hundred thousand (limits.py) and needs some for its files.
# Twice the calls that it takes at once, should each come by a connection of its own; those of replicas, hosts
# and their workers are some hundreds.
MAX_CONNECTIONS: Final = 8192

_BOTH: Final[Options] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)


def client_options(*, bulk: bool = False, server_name: str = "") -> Options:
    """Options of a channel.

    `bulk` keeps its connection apart, so that a payload never queues before a cancel.
    """
    options: Options = (
        *_BOTH,
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_BACKOFF_MS),
        # By its name a pause; what it bounds is the attempt.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.dns_min_time_between_resolutions_ms", MIN_LOOKUP_INTERVAL_MS),
        ("grpc.enable_http_proxy", 0),
        # Retries are the caller's (quartet.kit.call): gRPC's own abort the process on client streams.
        ("grpc.enable_retries", 0),
    )
    if bulk:
        options += (("grpc.use_local_subchannel_pool", 1),)
    if server_name:
        options += (("grpc.ssl_target_name_override", server_name),)
    return options


def server_options() -> Options:
    """Options of a server."""
    return (
        *_BOTH,
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.so_reuseport", 0),
        ("grpc.server.max_pending_requests", MAX_PENDING_RPCS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_RPCS),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    )
