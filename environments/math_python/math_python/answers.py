"""Whether a final answer is the expected one.

1. The answer stands in the last \\boxed{...}; without one there is no answer.
2. Numbers are compared by value: 1/2, \\frac{1}{2}, 0.5 and 50\\% are one number, and so are 1,000,
   1{,}000 and 1000. Spacing, styles and currency do not count; a unit in \\text{} need not be given, but
   two that differ are two answers.
3. Anything else is compared as text, without spaces, dollars and the commands that only change its looks.
   Nothing is evaluated, so no answer can take long.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

MAX_CHARS = 200
_SKIPPED = re.compile(r"\\!|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\?\$")
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
    *("squared", "cubed", "percent"),
}
# Commas or spaces that part thousands; in 1 1/2, 1234 567 and 0,125 they do not.
_THOUSANDS = re.compile(r"([+-]?[1-9]\d{0,2}(?:[, ]\d{3})+)((?:\.\d*)?(?: ?\\?%)?)")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac ?(?:(\d)|\{ ?([+-]?\d+) ?\}) ?(?:(\d)|\{ ?(\d+) ?\})")
_RATIO = re.compile(r"([+-]?\d+) ?/ ?(\d+)")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_AS_TEXT = re.compile(
    r"\\left|\\right|\\displaystyle|\\[!$]|\\text\s*|\\mathrm\s*|\$|(?<!\d) | (?!\d)"  # 1 1/2 is not 11/2
)


def same_answer(given: str, expected: str) -> bool:
    """Whether both say the same."""
    if not given.strip() or len(given) > MAX_CHARS:
        return False
    left, right = value_of(given), value_of(expected)
    if left is not None and right is not None:
        units = {unit for _, unit in (_bare(given), _bare(expected)) if unit}
        return left == right and len(units) < 2
    return _plain(given) == _plain(expected)


def value_of(text: str) -> Fraction | None:
    """The number that a text is, or None."""
    plain, _ = _bare(text)
    factor = Fraction(1, 100) if plain.endswith("%") else Fraction(1)
    plain = plain.removesuffix("%").removesuffix("\\").strip()
    if fraction := _FRACTION.fullmatch(plain):  # behind a number it is added to it, or multiplied with it
        sign, *parts = fraction.groups(default="")
        plain = f"{parts[0] or parts[1]}/{parts[2] or parts[3]}"
        factor = -factor if sign == "-" else factor
    if (ratio := _RATIO.fullmatch(plain)) and int(ratio[2]):
        return factor * Fraction(int(ratio[1]), int(ratio[2]))
    return factor * Fraction(Decimal(plain)) if _NUMBER.fullmatch(plain) else None


def _bare(text: str) -> tuple[str, str]:
    """What a text is without spacing, styles, currency and braces, and the unit behind it."""
    plain = text.replace("{,}", ",").replace("\u2212", "-")
    plain = _SPACE.sub(" ", _SKIPPED.sub("", plain)).strip().removesuffix(".")
    unit = ""
    if (behind := _BEHIND.search(plain)) and not _SCALES & _singular(behind[1] or ""):
        plain, unit = plain[: behind.start()], re.sub(r"\\\w+|[\s{}]", "", behind[0])
    plain = _STYLED.sub(r"\1", _BEFORE.sub("", plain)).strip()
    plain = plain[1:-1].strip() if re.fullmatch(r"\{[^{}]*\}", plain) else plain
    return _joined(plain).removesuffix("."), unit


def _plain(text: str) -> str:
    plain = _AS_TEXT.sub("", _SPACE.sub(" ", text).strip())
    return plain[1:-1] if plain.startswith("{") and plain.endswith("}") else plain


def _singular(words: str) -> set[str]:
    return {form for word in words.lower().split() for form in (word, word.removesuffix("s"))}


def _joined(text: str) -> str:
    """Thousands that are parted as one number."""
    parted = _THOUSANDS.fullmatch(text)
    return re.sub(r"[, ]", "", parted[1]) + parted[2] if parted else text
