"""The dialect of `vf-rl`: translation.py says what becomes of a file."""

from quartet.run.vf_rl.given import is_vf_rl, owns
from quartet.run.vf_rl.keys import SHARED
from quartet.run.vf_rl.translation import translate

__all__ = ["SHARED", "is_vf_rl", "owns", "translate"]
