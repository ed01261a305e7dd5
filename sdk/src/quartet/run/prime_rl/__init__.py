"""The dialect of prime-rl: translation.py says what becomes of a file."""

from quartet.run.prime_rl.form import Form, form_of, owns, without_value
from quartet.run.prime_rl.translation import VERSION, counts_on_later, translate

__all__ = ["VERSION", "Form", "counts_on_later", "form_of", "owns", "translate", "without_value"]
