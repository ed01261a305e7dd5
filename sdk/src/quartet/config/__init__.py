"""Configuration: frozen pydantic models read from TOML files and the command line.

`Config` is the base of every model, `load` reads one from an argument list, `main` is the body of every
`__main__`.
"""

from quartet.config.load import Loaded, load, validate
from quartet.config.main import main
from quartet.config.model import Config, ConfigError

__all__ = ["Config", "ConfigError", "Loaded", "load", "main", "validate"]
