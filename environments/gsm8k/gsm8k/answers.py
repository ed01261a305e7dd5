"""Which number a final answer is.

1. Currency, percent sign, spacing, styles and a unit in \\text{} do not count, nor do the commas of
   thousands, as 1,234 and as 1{,}234; a fraction is its value.
2. What has two numbers, or any other words, is none. Nothing is evaluated, so no answer can take long.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

MAX_CHARS = 100
_LOOKS = re.compile(r"\\!|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\?\$")
_SPACE = re.compile(r"\\[,;: ]|\\q?quad(?![a-z])|~|\s+")
_STYLE = r"\\(?:text|math)(?:bf|it|rm|sf|tt|normal)? ?"
_STYLED = re.compile(_STYLE + r"\{([^{}]*)\}")
# Before a number "USD", behind it "km" or "m^2"; not "million", which makes it another number.
_WORD = _STYLE + r"\{([^{}\d+-]*[^\W\d][^{}\d+-]*)\}"
_BEFORE = re.compile(rf"^{_STYLE}\{{ ?(?:US|USD|EUR|GBP|CAD|AUD|INR|Rs\.?) ?\}} ?")
_BEHIND = re.compile(rf"(?<=[\d.}}]) ?(?:{_WORD}(?:\^\{{?[23]\}}?)?|\^(?:\\circ|\{{\\circ\}}))$")
# Of each the plural, too.
_SCALES = {
    *("hundred", "thousand", "million", "billion", "trillion", "dozen", "score", "pair", "couple", "gross"),
    *("half", "halve", "third", "quarter", "fifth", "tenth", "hundredth", "thousandth", "square", "cube"),
    *("squared", "cubed"),
}
# Commas or spaces that part thousands; in 1 1/2, 1234 567 and 0,125 they do not.
_THOUSANDS = re.compile(r"([+-]?[1-9]\d{0,2}(?:[, ]\d{3})+)((?:\.\d*)?(?: ?\\?%)?)")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac ?(?:(\d)|\{ ?([+-]?\d+) ?\}) ?(?:(\d)|\{ ?(\d+) ?\})")
_RATIO = re.compile(r"([+-]?\d+) ?/ ?(\d+)")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")


def number(text: str) -> Fraction | None:
    """The number that a text is, or None."""
    if len(text) > MAX_CHARS:
        return None
    plain = _bare(text).removesuffix("%").removesuffix("\\").strip()
    factor = 1
    if fraction := _FRACTION.fullmatch(plain):  # behind a number it is added to it, or multiplied with it
        sign, *parts = fraction.groups(default="")
        plain = f"{parts[0] or parts[1]}/{parts[2] or parts[3]}"
        factor = -factor if sign == "-" else factor
    if (ratio := _RATIO.fullmatch(plain)) and int(ratio[2]):
        return factor * Fraction(int(ratio[1]), int(ratio[2]))
    return factor * Fraction(Decimal(plain)) if _NUMBER.fullmatch(plain) else None


def _bare(text: str) -> str:
    """What a text is without spacing, styles, currency, unit and braces."""
    plain = text.replace("{,}", ",").replace("\u2212", "-")
    plain = _SPACE.sub(" ", _LOOKS.sub("", plain)).strip().removesuffix(".")
    if (behind := _BEHIND.search(plain)) and not _SCALES & _singular(behind[1] or ""):
        plain = plain[: behind.start()]
    plain = _STYLED.sub(r"\1", _BEFORE.sub("", plain)).strip()
    plain = plain[1:-1].strip() if re.fullmatch(r"\{[^{}]*\}", plain) else plain
    return _joined(plain).removesuffix(".")


def _singular(words: str) -> set[str]:
    return {form for word in words.lower().split() for form in (word, word.removesuffix("s"))}


def _joined(text: str) -> str:
    """Thousands that are parted as one number."""
    parted = _THOUSANDS.fullmatch(text)
    return re.sub(r"[, ]", "", parted[1]) + parted[2] if parted else text
