"""Parse and format bytes, counts, seconds and dtypes for people, and check arguments.

    "16GiB" ─ parse_bytes ─► 17179869184 ─ format_bytes ─► "16.0 GiB"
    "bf16" ─ dtype_name ─► "bfloat16"        jnp.float32 ─► "float32"        "float99" ─► UsageError

Suffixes follow the standards: ``KiB``, ``MiB``, ``GiB``, ``TiB`` are powers of 1024, ``KB``, ``MB``, ``GB``,
``TB`` powers of 1000. A bare ``K``, ``M``, ``G`` or ``T`` is binary, as in ``ulimit`` and ``docker``.
Memory is printed in binary units, rates in decimal ones (GB/s), as disks and buses are sold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from shardload.errors import UsageError

KV_CACHE = re.compile(r"(?:([1-9]\d{0,8})x)?([1-9]\d{0,8})", re.ASCII)
"""Rows and tokens of a KV cache as text: ``8x4096``, or tokens alone."""
_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_PREFIXES = ("", "k", "m", "g", "t", "p")
_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kmgtp]?)(i?b?)", re.IGNORECASE)


UNIT_NEEDED = 1 << 20
"""Smallest number of bytes that may be given without a unit: a smaller one, such as ``16``, probably means GiB."""


def is_integer(value: object) -> bool:
    """Whether a value is an integer of Python or NumPy; false for a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def rows_and_tokens(wanted: tuple[int, int] | str) -> tuple[int, int]:
    """Return the rows and tokens of a KV cache: of a pair, or of text such as ``8x4096``; ``4096`` is one row."""
    found: Any = wanted
    if isinstance(wanted, str) and (match := KV_CACHE.fullmatch(wanted)):
        found = (int(match[1] or 1), int(match[2]))
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    if not is_pair or not all(is_integer(number) and number > 0 for number in found):
        raise UsageError(f"Cannot use kv_cache={wanted!r:.60}: expected rows and tokens, such as '8x4096' or (8, 4096)")
    return int(found[0]), int(found[1])


def is_real(value: object) -> bool:
    """Whether a value is a real number of Python or NumPy; false for a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_kind(argument: str, value: Any, kind: Any, expected: str) -> None:
    """Raise a `UsageError` unless an argument is an instance of ``kind``, which the message calls ``expected``."""
    if kind is bool:
        import numpy as np  # here, as the command prints its help without it

        kind = bool | np.bool_
    if not isinstance(value, kind):
        raise UsageError(f"Cannot use {argument}={value!r:.60}: expected {expected}")


def check_choice(argument: str, value: Any, choices: Iterable[str | None]) -> None:
    """Raise a `UsageError` unless an argument equals one of ``choices``: names, and ``None`` where it is allowed."""
    known = list(choices)
    # Not `in` alone: arrays compare element by element.
    if not isinstance(value, str | None) or value not in known:
        *first, last = map(repr, known)
        raise UsageError(f"Cannot use {argument}={value!r:.60}: expected {', '.join(first)} or {last}")


def check_name_map(argument: str, value: Any) -> None:
    """Raise a `UsageError` unless an argument is a mapping from names to names, or ``None``."""
    check_kind(argument, value, Mapping | None, "a mapping")
    if not all(isinstance(name, str) for pair in (value or {}).items() for name in pair):
        raise UsageError(f"Cannot use {argument}={value!r:.60}: expected a mapping from names to names")


def check_no_iterator(argument: str, value: Any) -> None:
    """Raise a `UsageError` if an argument is an iterator, which JAX would treat as a single value."""
    if isinstance(value, Iterator):
        raise UsageError(f"Cannot use {argument}={value!r:.60}: expected its values, such as a list of them")


def is_function(value: Any) -> bool:
    """Whether an argument is a function to call for the value. Classes and models can be called, but are values."""
    return callable(value) and not isinstance(value, type) and not hasattr(value, "trainable_variables")


def parse_bytes(text: str | int, *, least: int = 0) -> int:
    """Return the number of bytes in ``"16GiB"``, ``"1.5 GB"``, ``"512M"``, ``"17179869184"``, or an int.

    An int must be at least ``least``. Text needs a unit if the number is below 1 MiB. Raises a `ValueError` for
    anything else.
    """
    if is_integer(text):
        return _with_unit(_positive(int(text), str(text)), str(text), least=least)
    if not isinstance(text, str):
        raise ValueError(f"A number of bytes is an int, or text like 16GiB, got {text!r}")
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or ("i" in match[3].lower() and not match[2]):
        raise ValueError(f"Cannot read {text!r} as a number of bytes. Write it like 16GiB, 512MiB or 2GB")
    base = 1000 if match[3].lower() == "b" else 1024
    # Decimal, as floats have sixteen digits: the bytes of large sizes would be off.
    n = _positive(int(Decimal(match[1]) * base ** _PREFIXES.index(match[2].lower())), text)
    return n if match[2] or match[3] else _with_unit(n, match[1], least=UNIT_NEEDED)


def byte_count(argument: str, wanted: int | str, *, least: int = 0) -> int:
    """Return the number of bytes in an argument (``"16GiB"``, an int); raise a `UsageError` that names it."""
    try:
        return parse_bytes(wanted, least=least)
    except ValueError as error:
        raise UsageError(f"{argument}: {error}") from error


def _with_unit(n: int, text: str, *, least: int) -> int:
    if n < least:
        raise ValueError(
            f"{text} means {text} {'byte' if text == '1' else 'bytes'}. Write {text}GiB, or {text}B if you mean bytes"
        )
    return n


def _positive(n: int, text: str) -> int:
    if not 0 < n < 1 << 63:
        raise ValueError(f"A number of bytes must be positive and below 8 EiB, got {text!r}")
    return n


def format_bytes(n: int) -> str:
    """Return a number of bytes as text, ``511.4 MiB``; exact below 1 KiB."""
    return _scaled(n, 1024, _BINARY) or f"{n} B"


def format_bytes_up(n: int) -> str:
    """Return a number of bytes as text, ``511.5 MiB``, rounded up: a limit set to that has room for ``n`` bytes."""
    return _scaled(n, 1024, _BINARY, math.ceil) or f"{n} B"


def format_bytes_down(n: int) -> str:
    """Return a number of bytes as text, ``511.4 MiB``, rounded down: the text for a limit is not above the limit."""
    return _scaled(n, 1024, _BINARY, math.floor) or f"{n} B"


def format_count(n: int) -> str:
    """Return a count (of parameters) as text, ``270.1 M``; exact below a thousand."""
    return _scaled(n, 1000, ("k", "M", "B", "T")) or str(n)


def _scaled(n: int, base: int, units: tuple[str, ...], rounding: Callable[[float], int] | None = None) -> str:
    """Format ``n`` with one decimal in the first unit in which it shows less than 1,000; ``""`` if below ``base``."""
    if abs(n) < base:
        return ""
    value, text = float(n), ""
    for unit in units:
        value /= base
        shown = value if rounding is None else rounding(value * 10) / 10
        text = f"{shown:,.1f} {unit}"
        # From 999.95 on, one decimal would show 1,000.0.
        if abs(shown) < 999.95:
            break
    return text


def time_ago(seconds: float) -> str:
    """Return how long ago something was, in its largest unit: ``3 d``; 0 s if a clock is ahead."""
    whole = max(0, int(seconds))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= length:
            return f"{whole // length} {unit}"
    return f"{whole} s"


def format_seconds(seconds: float | None) -> str:
    """Return a duration as text: ``45 ms``, ``1.29 s``, ``3 min 05 s``; a dash for ``None`` and infinity."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def format_rate(gb_per_s: float | None) -> str:
    """Return a rate of reading or writing as text: ``1.29 GB/s``, ``45 MB/s``; a dash for ``None`` and infinity."""
    if gb_per_s is None or not math.isfinite(gb_per_s):
        return "-"
    if gb_per_s < 0.1:
        return f"{1000 * gb_per_s:.3g} MB/s"
    return f"{gb_per_s:.2f} GB/s"


def format_parameters(n: int) -> str:
    """Return a number of parameters as text: ``1 parameter``, ``270.1 M parameters``."""
    return plural(n, "parameter") if n < 1000 else f"{format_count(n)} parameters"


def json_number(value: float) -> float | str:
    """Return a number for JSON, which has neither NaN nor infinity: ``"nan"``, ``"inf"`` or ``"-inf"`` for these."""
    return value if math.isfinite(value) else str(value)


def plural(n: int, noun: str) -> str:
    """Return a count and its noun, in the plural if needed: ``1 tensor``, ``1,234 tensors``, ``2 batches``."""
    if n == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{n:,} {noun[:-1]}ies"
    hisses = noun.endswith(("s", "x", "ch", "sh")) and noun != "epoch"
    return f"{n:,} {noun}{'es' if hisses else 's'}"


def exact_bytes(n: int) -> str:
    """Return ``1 byte`` or ``1048576 bytes``: without separators, so that the number can be copied to an option."""
    return f"{n} byte" if n == 1 else f"{n} bytes"


FLOATS = ("bfloat16", "float16", "float32")
"""Dtypes that weights can be loaded in, in Python (``dtype=``) and on the command line."""
MIXED = ("mixed_bfloat16", "mixed_float16")
"""Dtype policies of Keras with float32 weights and products in 16 bits, for Python and for plans by the command."""
_ALSO = ("float64", *MIXED)
"""Names accepted in Python, not by every command: float64 (in JAX's 64-bit mode), and dtype policies of Keras."""
_SPELLINGS = {
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
}
_QUANTISED = r"(int8|int4|float8)\w*_from_\w+"


def dtype_name(wanted: Any) -> Any:
    """Return the full name (``bfloat16`` for ``"bf16"``) of a dtype or policy; ``None`` and objects are unchanged."""
    if wanted is None or hasattr(wanted, "variable_dtype"):
        return wanted
    name = _canonical(wanted)
    if name in FLOATS or name in _ALSO or re.fullmatch(_QUANTISED, name):
        return name
    raise UsageError(
        f"Cannot load in the dtype {wanted!r}. Choose {', '.join(FLOATS)} (or bf16, fp16, fp32), float64 with "
        "jax_enable_x64, or a dtype policy of Keras such as mixed_bfloat16"
    )


def plain_dtype_name(wanted: Any, *, doing: str, also: Iterable[str] = ()) -> str:
    """Return NumPy's name of a dtype for tensors outside of a model; refuse Keras' policies, which need layers.

    ``doing`` completes the error "Cannot … in the dtype": ``"write"``. ``also`` are further names to accept.
    """
    name, known = _canonical(wanted), (*FLOATS, "float64", *also)
    if name not in known:
        raise UsageError(f"Cannot {doing} in the dtype {wanted!r}. Choose {', '.join(known)} (or bf16, fp16, fp32)")
    return name


def _canonical(wanted: Any) -> str:
    """Return one name for all forms of a dtype: ``float32`` for ``"fp32"``, ``np.dtype("f4")`` and ``jnp.float32``."""
    dtype = getattr(wanted, "dtype", wanted)
    text = wanted if isinstance(wanted, str) else str(getattr(dtype, "name", getattr(wanted, "__name__", wanted)))
    return _SPELLINGS.get(text.lower(), text.lower())


def spare_bytes(n_bytes: int) -> int:
    """Return the bytes to leave free on a disk when files of ``n_bytes`` are written: an eighth, from 1 to 64 MiB."""
    return min(max(n_bytes // 8, 1 << 20), 64 << 20)
