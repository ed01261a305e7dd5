"""The adapter to the v1 API of Verifiers (0.4). Imported by workers only; the front never imports it."""

from quartet_envhost.v1.deferred import ANTHROPIC, defer

defer(ANTHROPIC)  # before Verifiers is imported
