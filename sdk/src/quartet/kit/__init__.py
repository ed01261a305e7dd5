"""The service kit: what all four services share on the wire, and nothing about their work.

Import the modules by name (`quartet.kit.server`, `.channel`, `.call`, `.stream`, `.health`, `.logs`,
`.metrics`, `.memory`).
"""

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    # structlog would import rich, where that is installed, to colour the tracebacks that it shows in a
    # terminal: a tenth of a second of CPU of each service and command, whose logs are JSON.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog as structlog
    finally:
        del sys.modules["rich"]
