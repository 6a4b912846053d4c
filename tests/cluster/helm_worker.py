"""Runs Helm's own engine over JSON lines: one call a line in, one result a line out.

A process of its own, since Helm's library brings the Go runtime with its threads and signal handlers.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python


def _answer(call: dict[str, Any]) -> dict[str, Any]:
    values = call["values"]
    try:
        if call["verb"] == "lint":
            return {"lint": helm_python.lint(call["chart"], values, strict=True, kube_version="v1.30.0")}
        with helm_python.Chart.load(call["chart"]) as chart:
            return {"files": chart.render(values, name=call["name"], namespace="llm")}
    except helm_python.HelmError as error:
        return {"error": str(error)}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
