"""Several refusals as one, so that whoever wrote a file mends all of it before the next try."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from quartet.config.model import ConfigError

#: Of the things that are wrong: a file with a wrong key in each of its tables has fewer.
MAX_TOLD = 40
#: Between two of them.
ALSO = "\n  also: "


@contextmanager
def gathered(refused: list[ConfigError]) -> Iterator[None]:
    """What is refused within is one more of these, and goes no further."""
    try:
        yield
    except ConfigError as error:
        refused.append(error)


def together(refusals: Iterable[ConfigError]) -> ConfigError:
    """A line for each, up to a bound, none twice; with the parts of the first. At least one is given."""
    each = list({str(one): one for refusal in refusals for one in refusal.each}.values())
    first = each[0]
    if len(each) == 1:
        return first
    text = ALSO.join(str(one) for one in each[:MAX_TOLD])
    if len(each) > MAX_TOLD:
        text += f"\n  and {len(each) - MAX_TOLD} more"
    return ConfigError(text, key=first.key, value=first.value, remedy=first.remedy, each=tuple(each))
