"""Units of measurement at the end of an answer, each spelling with the symbol that stands for it."""

from __future__ import annotations

import re

_SPELLINGS = {
    "°": "degree degrees deg",
    "%": "percent per\\ cent percentage pct",
    "$": "dollar dollars usd",
    "¢": "cent cents",
    "€": "euro euros eur",
    "£": "pounds\\ sterling",
    "m": "meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mile miles",
    "g": "gram grams",
    "kg": "kg kilogram kilograms",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "s": "sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "hr hrs hour hours",
    "d": "day days",
    "wk": "week weeks",
    "mo": "month months",
    "yr": "yr yrs year years",
    "L": "liter liters litre litres",
    "mL": "ml mL milliliter milliliters millilitre millilitres",
    "gal": "gallon gallons",
    "mph": "mph miles\\ per\\ hour",
    "m/s": "m/s meters\\ per\\ second",
    "km/h": "km/h kph kilometers\\ per\\ hour",
    "unit": "unit units",
    "rad": "rad radian radians",
    "J": "joule joules",
    "N": "newton newtons",
    "W": "watt watts",
    "V": "volt volts",
    "Hz": "Hz hertz",
    "K": "kelvin kelvins",
}
_SYMBOL = {
    spelling.replace("\\ ", " "): symbol
    for symbol, spellings in _SPELLINGS.items()
    for spelling in re.split(r"(?<!\\) ", spellings)
}

# "5 million" is not 5, and "12 mod 17" not 12.
_NO_UNIT = {
    *("half", "halves", "third", "thirds", "quarter", "quarters", "fourth", "fourths", "fifth", "fifths", "sixth"),
    *("sixths", "tenth", "tenths", "hundredth", "hundredths", "thousandth", "thousandths", "pair", "pairs", "dozen"),
    *("dozens", "score", "hundred", "hundreds", "thousand", "thousands", "million", "millions", "billion", "billions"),
    *("trillion", "trillions", "squared", "cubed", "factorial", "choose", "mod", "modulo", "base", "and", "or", "to"),
    *("if", "when", "for", "where", "is", "not", "times", "plus", "minus", "over", "by", "least", "most", "more"),
    *("less", "than", "pi", "i"),
}

_POWER = r"(?:\s*\^\s*\{?\s*([23])\s*\}?)?"
_WORD_BEFORE = {"square": "2", "sq": "2", "sq.": "2", "cubic": "3", "cu": "3", "cu.": "3"}
_WRAPPED = re.compile(r"\\(?:text|mbox|textrm|mathrm|operatorname|rm)\s*\{([^{}]*)\}" + _POWER + r"\s*$")
_BARE = re.compile(
    r"(?<![A-Za-z\\])((?:(?:square|sq\.?|cubic|cu\.?)\s+)?(?:"
    + "|".join(sorted((re.escape(s) for s in _SYMBOL if len(s) > 1), key=len, reverse=True))
    + r")\.?)"
    + _POWER
    + r"\s*$"
)
_DIGIT = re.compile(r"\d")

_BEFORE = re.compile(r"(-?)\s*(?:\\\$|\\text\s*\{\s*\\?\$\s*\}|(€|£|¥))\s*")
_BEHIND = re.compile(r"\s*(\\?%|€|£|¥|¢)\s*\$?$")
_DEGREE = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\s*\\degree(?![A-Za-z])")
_FUNCTION = re.compile(r"\\(?!frac|sqrt|pi|text|circ)[A-Za-z]")


def split_sign(text: str) -> tuple[str, str]:
    r"""(the rest, sign) for a sign of currency before a number, or one of currency or percent behind the answer."""
    before, behind = _BEFORE.match(text), _BEHIND.search(text)
    if before and _DIGIT.match(text, before.end()):
        return before[1] + text[before.end() :], before[2] or "$"
    if behind:
        return text[: behind.start()], behind[1].removeprefix("\\")
    return text, ""


def split_degrees(text: str) -> tuple[str, str]:
    """(text without signs of degrees, "°" where there were any); an angle inside a function keeps its own."""
    bare = _DEGREE.sub("", text)
    if bare == text:
        return text, ""
    if _FUNCTION.search(bare):
        return _DEGREE.sub(r"^\\circ ", text), ""
    return bare, "°"


def split_unit(text: str) -> tuple[str, str]:
    r"""(what stands before the unit, its symbol), such as ("15", "cm^2") for `15 \mbox{ cm}^2`; "" for no unit.

    Any words in `\text{...}` behind a number are a unit, as in `18 \text{ apples}`, numerals aside; bare words only
    where they are known.
    """
    match = _WRAPPED.search(text)
    if match and _DIGIT.search(text, 0, match.start()):
        words = match.group(1).strip().strip("()").lower().split()
        if words and not _NO_UNIT.intersection(words) and not any(_DIGIT.search(word) for word in words):
            return text[: match.start()], _symbol(match.group(1).strip().strip("()"), match.group(2))
    match = _BARE.search(text)
    if match and _DIGIT.search(text, 0, match.start()):
        return text[: match.start()], _symbol(match.group(1), match.group(2))
    return text, ""


def _symbol(words: str, power: str | None) -> str:
    words = " ".join(words.replace(".", "").split())
    first, _, rest = words.partition(" ")
    if rest and first.lower() in _WORD_BEFORE:
        words, power = rest, _WORD_BEFORE[first.lower()]
    symbol = _SYMBOL.get(words, _SYMBOL.get(words.lower(), words))
    return symbol if power is None else f"{symbol}^{power}"
