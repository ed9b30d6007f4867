"""Numbers of JSON between bounds, as expressions of Lark's terminals.

Without bounds a model may write digits up to its answer's limit: 64 bits of an integer, 17 digits of a fraction and an
exponent of at most 3 are what readers with double precision can tell apart.
"""

import json
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor, lcm

_PLACES = 17  # after the point
_DIGITS = 19  # before it
_LEAST, _MOST = -(2**63), 2**63 - 1
# With 19 digits before the point all stays below the largest double; with 2 digits what is not 0 stays above 0.
_WIDE = 10**18  # llguidance reads bounds as doubles
_LARGE = "[+]?([0-9]{1,2}|1[0-9]{2}|2[0-7][0-9]|28[0-8])"


class NoNumber(Exception):
    """No grammar here can hold it; the text says why."""


@dataclass(frozen=True)
class Numbers:
    """least, most: bounds; above, below: these are not among them. step: its multiples; 0: all."""

    integer: bool = False
    least: Fraction | None = None
    most: Fraction | None = None
    above: bool = False
    below: bool = False
    step: Fraction = Fraction(0)

    def both(self, other: "Numbers") -> "Numbers":
        least, above = max([(n.least, n.above) for n in (self, other) if n.least is not None], default=(None, False))
        most, ends = min([(n.most, not n.below) for n in (self, other) if n.most is not None], default=(None, True))
        step = _common(self.step, other.step) if self.step and other.step else self.step or other.step
        return Numbers(self.integer or other.integer, least, most, above, not ends, step)

    def fits(self, value: int | float) -> bool:
        number = exact(value)
        return not (
            (self.integer and number.denominator != 1)
            or (self.least is not None and (number < self.least or (self.above and number == self.least)))
            or (self.most is not None and (number > self.most or (self.below and number == self.most)))
            or (self.step and (number / self.step).denominator != 1)
        )

    def any(self) -> bool:
        """Is there one?"""
        if self.least is None or self.most is None:
            return True
        step = _common(self.step, Fraction(1)) if self.integer and self.step else self.step or Fraction(self.integer)
        if not step:
            return self.least < self.most or (self.least == self.most and not (self.above or self.below))
        first, last = ceil(self.least / step), floor(self.most / step)
        return first + (self.above and first * step == self.least) <= last - (self.below and last * step == self.most)

    def written(self, bounded: bool) -> str:
        """An expression of a terminal or, after `%json`, a schema. NoNumber."""
        step = _common(self.step, Fraction(1)) if self.integer and self.step else self.step
        if self.integer or (step and step.denominator == 1):
            low, high = self._integers(bounded)
            if step > 1:
                first, last = (None if n is None else max(-_WIDE, min(_WIDE, n)) for n in (low, high))
                return _multiples(int(step), first, last, False, False)
            return f"/{_integers(low, high)}/"
        places = next((n for n in range(_PLACES + 1) if step == Fraction(1, 10**n)), None) if step else _PLACES
        if places is None:
            least = -(10.0**15) if self.least is None else float(self.least)
            most = 10.0**15 if self.most is None else float(self.most)
            if step.numerator >= 2**31 or 10**9 % step.denominator:
                raise NoNumber("multipleOf has too many digits")
            return _multiples(float(step), least, most, self.above, self.below)
        longest = max(len(str(int(abs(n or 0)))) for n in (self.least, self.most, 10 ** (_DIGITS - 1)))
        form = _Form(places, longest if bounded else None, not bounded and not step)
        parts = []
        if self.most is None or self.most > 0 or (self.most == 0 and not self.below):
            begin = self.least if self.least is not None and self.least >= 0 else Fraction(0)
            parts.append(form.between(begin, self.above and begin == self.least, self.most, self.below, not self.step))
        if self.least is None or self.least < 0:
            end = None if self.least is None else -self.least
            begin, above = (-self.most, self.below) if self.most is not None and self.most < 0 else (Fraction(0), True)
            parts.append(f'"-" {form.between(begin, above, end, self.above, not self.step)}')
        return "(" + " | ".join(parts) + ")"

    def _integers(self, bounded: bool) -> tuple[int | None, int | None]:
        low = None if self.least is None else ceil(self.least) + (self.above and self.least.denominator == 1)
        high = None if self.most is None else floor(self.most) - (self.below and self.most.denominator == 1)
        if bounded and low is None:
            low = _LEAST if high is None or high >= 0 else min(_LEAST, 10 * high)
        if bounded and high is None:
            high = _MOST if low is None or low <= 0 else max(_MOST, 10 * low)
        return low, high


def exact(value: int | float | Decimal) -> Fraction:
    """As it was written: 0.1 is a tenth."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _common(a: Fraction, b: Fraction) -> Fraction:
    """The least common multiple."""
    return Fraction(lcm(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator)


def _multiples(step: float, low: float | None, high: float | None, above: bool, below: bool) -> str:
    """llguidance has a counter of remainders."""
    if step >= 2**31:
        raise NoNumber("multipleOf is too large")
    ends = {"exclusiveMinimum" if above else "minimum": low, "exclusiveMaximum" if below else "maximum": high}
    schema = {"type": "integer" if isinstance(step, int) else "number", "multipleOf": step}
    schema |= {name: end for name, end in ends.items() if end is not None}
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"


def _integers(low: int | None, high: int | None) -> str:
    parts = []
    if high is None or high >= 0:
        parts.append(_between(max(low or 0, 0), high))
    if low is None or low < 0:
        parts.append("-" + _between(1 if high is None or high >= 0 else -high, None if low is None else -low))
    return "(" + "|".join(parts) + ")"


def _between(low: int, high: int | None) -> str:
    """Digits of the whole numbers from `low` on, up to `high` where it is given."""
    first = str(low)
    if high is None:
        return f"({_same_length(first, '9' * len(first))}|[1-9][0-9]{{{len(first)},}})"
    last = str(high)
    if len(first) == len(last):
        return _same_length(first, last)
    between = f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}|" if len(last) > len(first) + 1 else ""
    top = _same_length("1" + "0" * (len(last) - 1), last)
    return f"({_same_length(first, '9' * len(first))}|{between}{top})"


def _same_length(low: str, high: str) -> str:
    if low == high:
        return low
    rest = len(low) - 1
    if not rest or (set(low[1:]) == {"0"} and set(high[1:]) == {"9"}):
        return f"[{low[0]}-{high[0]}]" + (f"[0-9]{{{rest}}}" if rest else "")
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    parts = [low[0] + _same_length(low[1:], "9" * rest)]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    parts.append(high[0] + _same_length("0" * rest, high[1:]))
    return "(" + "|".join(parts) + ")"


@dataclass(frozen=True)
class _Form:
    """How numbers without a sign are written. places: digits after the point; digits: before it, None for no limit.

    endless: any number of places, and exponents of any length.
    """

    places: int
    digits: int | None
    endless: bool

    def between(self, low: Fraction, above: bool, high: Fraction | None, below: bool, exponents: bool) -> str:
        least = self._least(low, above)
        if high is not None:
            return f"({least} & {self._most(high, below)})"
        if low or not exponents:
            return least
        if self.endless:
            return f"({least} /([eE][+-]?[0-9]+)?/)"
        small = "[0-9]{1,2}" if above else "[0-9]{1,3}"
        return f"({least} /([eE](-{small}|{_LARGE}))?/)"

    def _least(self, low: Fraction, above: bool) -> str:
        whole, rest = self._split(low)
        more = _between(whole + 1, 10**self.digits - 1 if self.digits else None) + self._any_rest()
        parts = [more] if self.digits is None or len(str(whole + 1)) <= self.digits else []
        if rest:
            after = [
                rest[:at] + f"[{int(rest[at]) + 1}-9]" + self._more(at + 1) for at in range(len(rest)) if rest[at] < "9"
            ]
        elif above:
            after = ["0" * zeros + "[1-9]" + self._more(zeros + 1) for zeros in range(self.places)]
        else:
            after = []
        if rest:
            after.append(rest + (self._not_zero(len(rest)) if above else self._more(len(rest))))
        tail = f"[.]({'|'.join(after)})" if after else None
        if not rest and not above:
            parts.append(f"{whole}{self._any_rest()}")
        elif tail:
            parts.append(f"{whole}{tail}")
        return "/(" + "|".join(parts) + ")/"

    def _most(self, high: Fraction, below: bool) -> str:
        whole, rest = self._split(high)
        parts = [_between(0, whole - 1) + self._any_rest()] if whole else []
        if not rest:
            parts += [] if below else [f"{whole}([.]0{{1,{self.places}}})?" if self.places else str(whole)]
        else:
            parts.append(str(whole))
            after = [
                rest[:at] + f"[0-{int(rest[at]) - 1}]" + self._more(at + 1) for at in range(len(rest)) if rest[at] > "0"
            ]
            after += [rest[:at] for at in range(1, len(rest))]
            after += [] if below else [rest + f"0{{0,{self.places - len(rest)}}}"]
            parts.append(f"{whole}[.]({'|'.join(after)})")
        return "/(" + "|".join(parts) + ")/"

    def _split(self, bound: Fraction) -> tuple[int, str]:
        """What is before the point, and after it without zeros at the end."""
        scaled = bound * 10**self.places
        if scaled.denominator != 1:
            raise NoNumber(f"a bound has more than {self.places} digits after the point")
        whole, rest = divmod(int(scaled), 10**self.places)
        return whole, str(rest).zfill(self.places).rstrip("0") if rest else ""

    def _any_rest(self) -> str:
        return f"([.][0-9]{'+' if self.endless else f'{{1,{self.places}}}'})?" if self.places else ""

    def _more(self, used: int) -> str:
        left = self.places - used
        return "[0-9]*" if self.endless else f"[0-9]{{0,{left}}}" if left > 0 else ""

    def _not_zero(self, used: int) -> str:
        left = self.places - used
        return "(" + "|".join("0" * zeros + "[1-9]" + self._more(used + zeros + 1) for zeros in range(left)) + ")"
