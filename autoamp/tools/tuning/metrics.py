"""How a program reports its metric: by `report_metric`, or by a printed line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from autoamp.errors import UsageError

METRICS_VARIABLE = "AUTOAMP_METRICS"
"""The environment variable with the file that `report_metric` appends to."""

_NUMBER = r"[-+]?(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?)"


def report_metric(name: str, value: Any) -> None:
    """Tell ``autoamp tune`` how well the program does; the last value of a name counts. Otherwise it does nothing.

    Args:
        name: The name given to ``--metric``.
        value: A number, or a tensor of one element.

    Raises:
        UsageError: The value is no number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        hint = "give a number, or a tensor of one element"
        raise UsageError(f"report_metric({name!r}, ...) got {value!r}; {hint}") from None
    path = os.environ.get(METRICS_VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "value": number}) + "\n")


def metric_of(name: str, path: Path, text: str) -> float | None:
    """Return the last value of a name that a program reported or printed; None if there is none.

    Args:
        name: The name.
        path: The file that `report_metric` wrote. If it has no such value, the output counts.
        text: The program's output, where a number follows ``name: `` or ``name=``.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    values = [found["value"] for found in map(json.loads, lines) if found["name"] == name]
    if not values:
        pattern = rf"(?<![\w.]){re.escape(name)}[\"']?\s*[:=]\s*({_NUMBER})(?![\w])"
        values = re.findall(pattern, text, re.IGNORECASE)
    return float(values[-1]) if values else None


def printed_names(text: str) -> list[str]:
    """Return the names in a program's output that a number follows, as for `metric_of`, each once."""
    return list(dict.fromkeys(re.findall(rf"([^\W\d]\w*)[\"']?\s*[:=]\s*{_NUMBER}(?!\w)", text, re.IGNORECASE)))
