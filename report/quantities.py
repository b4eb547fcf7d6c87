"""Numbers as text for people: bytes, counts, shares, errors and times. All reports use these functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun: 1 tensor, 2 tensors."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def dimensions(shape: Sequence[int | str], times: str = " × ") -> str:
    """Return a shape in words: 4,096 × 1,024."""
    return times.join(size if isinstance(size, str) else f"{size:,}" for size in shape)


def decimal(number: int, unit: str = "") -> str:
    """Return a number as four digits with a decimal prefix, such as 7.568 GFLOP or 13.75 G.

    Below 1,000 it is the number itself.
    """
    if number < 1000:
        return f"{number:,} {'bytes' if unit == 'B' else unit}".rstrip()
    return f"{_prefixed(number, 1000, _DECIMAL)}{unit}"


def decimal_bytes(nbytes: int) -> str:
    """Return bytes as tables show them, in four digits and powers of 1000: 16.38 GB."""
    return decimal(nbytes, "B")


def binary_bytes(nbytes: int) -> str:
    """Return bytes in four digits and powers of 1024: 15.26 GiB."""
    return f"{nbytes:,} bytes" if nbytes < 1024 else _prefixed(nbytes, 1024, _BINARY)


def whole_bytes(nbytes: int) -> str:
    """Return the exact number of bytes as text, or four digits from 10**8 on."""
    return f"{nbytes:,} bytes" if nbytes < 10**8 else decimal_bytes(nbytes)


def rounded_bytes(nbytes: float) -> str:
    """Return the size of a file: 1,234 bytes, 1.2 MB, 16.4 GB. The units are decimal, as on disks and the hub."""
    if nbytes < 10_000:
        return f"{nbytes:,.0f} bytes"
    power = next((power for power in (1, 2, 3) if nbytes / 1000**power < 1000), 4)
    return f"{nbytes / 1000**power:,.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def rounded_flops(flops: float) -> str:
    """Return FLOPs with two decimals and a space before the prefix: 1.24 M, 16.10 G."""
    if flops < 1000:
        return f"{flops:,.0f}"
    power = next((power for power in (1, 2, 3) if flops / 1000**power < 1000), 4)
    return f"{flops / 1000**power:,.2f} {'kMGT'[power - 1]}"


def abbreviated(number: int, units: Sequence[str] = "KMBT", one: str = "") -> str:
    """Return a number of parameters in three digits: 982, 12.3M, 1.24B, 405B.

    `units` are the letters for thousands, millions and so on ("kMGT" for other numbers than parameters). `one` is the
    unit of a number below 1,000, such as " B".
    """
    for power, unit in zip((12, 9, 6, 3), reversed(units), strict=True):
        if number >= 10**power:
            value = number / 10**power
            return f"{value:,.0f}{unit}" if value >= 99.95 else f"{value:.3g}{unit}"
    return f"{number:,}{one}"


def abbreviated_bytes(nbytes: int) -> str:
    """Return bytes in three digits, as charts show them: 37.7 MB, 1.5 GB."""
    return abbreviated(nbytes, (" kB", " MB", " GB", " TB"), " B")


def _prefixed(number: int, base: int, units: Sequence[str]) -> str:
    """Return four digits of a number, and the unit for the power of `base` that suits it: 16.38 GB.

    The number must be at least `base`.
    """
    value, power = float(number), 0
    while value >= base - 0.05 and power < len(units) - 1:
        value, power = value / base, power + 1
    digits = 3 if value < 9.9995 else 2 if value < 99.995 else 1
    return f"{value:,.{digits}f} {units[power]}"


def percentage(part: int, total: int) -> str:
    """Return a share with one decimal, such as 7.6 %. A share that is not 0 is never shown as 0 (<0.1 %)."""
    share = 100 * part / total
    return "<0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def unbroken_percentage(part: int, total: int) -> str:
    """Return `percentage` with a no-break space, so that a page does not break the line there."""
    return percentage(part, total).replace(" ", "\u00a0")


def signed(number: int, words: Callable[[int], str]) -> str:
    """Return a difference with its sign. `words` formats its absolute value."""
    return "0" if number == 0 else f"{'+' if number > 0 else '-'}{words(abs(number))}"


def difference(before: int, after: int, words: Callable[[int], str]) -> str:
    """Return `after` minus `before`, signed and formatted by `words`."""
    return signed(after - before, words).replace("-", "−")


def percent_change(before: int, after: int) -> str:
    """Return the change in percent of `before`, or "" if `before` is 0 or nothing changed."""
    if before in (0, after):
        return ""
    share = 100 * (after - before) / before
    return f"{share:+.1f} %".replace("-", "−") if abs(share) >= 0.05 else f"{share:+.1g} %".replace("-", "−")


def cost_change(before: float, after: float) -> str:
    """Return the change of a cost as text: "+12.5 %", "-75.0 %", or "×16" from ten times on.

    It is "=" for no change, and "new" if the cost was 0 before.
    """
    if after == before:
        return "="
    if not before:
        return "new"
    if after >= 10 * before:
        return f"×{after / before:,.0f}"
    return f"{100 * (after / before - 1):+.1f} %"


def scientific(error: float) -> str:
    """Return an error in two digits, such as 1.2e-05. It is "0" only if the error is exactly 0."""
    return "0" if error == 0 else f"{error:.1e}"


def two_digits(value: float | None) -> str:
    """Return a number in two digits, such as 0.012 or 3.1e-05, and a dash for None."""
    return "–" if value is None else f"{value:.2g}"


def compact(value: float) -> str:
    """Return a number in one or two digits for a narrow cell: 0.25, 1.3, 87, 3e-5. NaN and infinity are a dash."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "–"
    if 0.095 <= value < 999.5:
        return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
    digits, _, power = f"{value:.0e}".partition("e")
    return f"{digits}e{int(power)}"


def nats(loss: float) -> str:
    """Return a loss in at most eight characters: 3.8311, 3.16e+03."""
    return f"{loss:.4f}" if loss < 999.99995 else f"{loss:.2e}"


def perplexity_words(perplexity: float) -> str:
    """Return a perplexity with two decimals, or without decimals from 1,000 on: 24.31, 1,234."""
    if perplexity >= 1e7:
        return scientific(perplexity)
    return f"{perplexity:,.2f}" if perplexity < 1000 else f"{perplexity:,.0f}"


def duration(seconds: float) -> str:
    """Return a time as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
