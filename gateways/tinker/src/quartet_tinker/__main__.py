"""`python -m quartet_tinker [@ file.toml ...] [--key value ...] [--dry-run | --preflight]`."""

from __future__ import annotations

import sys

import uvloop
from quartet.config import main
from quartet.kit import logs
from quartet.kit.folder import check_folder
from quartet.kit.tracing import exporting

from quartet_tinker.config import GatewayConfig
from quartet_tinker.door import check_here


def _run(config: GatewayConfig) -> None:
    logs.configure("tinker", config.log_level)
    from quartet_tinker.app import run

    with exporting("tinker"):
        uvloop.run(run(config))


def _preflight(config: GatewayConfig) -> None:
    check_here(config)
    if config.runs_dir is not None:
        check_folder("runs_dir", config.runs_dir)


if __name__ == "__main__":
    sys.exit(main(GatewayConfig, _run, preflight=_preflight))
