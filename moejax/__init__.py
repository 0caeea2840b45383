"""moejax trains sparse mixture-of-experts language models in JAX.

Names are loaded on first use, so that `import moejax` (and `moejax --help`) stays quick and imports no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moejax.config import Config
    from moejax.configure import dump_config, load_config
    from moejax.errors import UserError
    from moejax.plan.meter import Meter
    from moejax.train.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Config", "Meter", "Trainer", "UserError", "__version__", "dump_config", "load_config"]

_HOMES = {
    "Config": "moejax.config",
    "Meter": "moejax.plan.meter",
    "Trainer": "moejax.train.trainer",
    "UserError": "moejax.errors",
    "dump_config": "moejax.configure",
    "load_config": "moejax.configure",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'moejax' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
