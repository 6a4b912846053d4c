"""The chart for tests: rendered by Helm, and checked against the schemas of KubeRay's CRDs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "specray"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
CRDS = ROOT.parent / "shared" / "kuberay"

Manifest = dict[str, Any]

IMAGE: Manifest = {"image": {"repository": "registry.example.com/specray"}}
"""Values without a default."""
KEY = {"name": "prometheus", "sha256": "0" * 64, "can_observe": True}


class RenderError(Exception):
    """Helm refuses the values or the chart."""


class Renderer:
    """Helm in a child process; a context."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("helm_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=10)

    def lint(self, values: Manifest) -> list[Manifest]:
        """Returns the findings of a strict ``helm lint``, without mere advice."""
        report = self._call("lint", values, CHART, "demo")["lint"]
        assert report["total_charts_linted"] == 1
        return [message for message in report["messages"] if message["severity"] > 1]

    def files(self, values: Manifest, *, chart: Path = CHART, name: str = "demo") -> dict[str, str]:
        """Returns rendered texts by their template's name. Raises RenderError."""
        rendered = self._call("render", values, chart, name)["files"]
        return {path.partition("/templates/")[2]: text for path, text in rendered.items()}

    def objects(
        self, values: Manifest, *, chart: Path = CHART, name: str = "demo"
    ) -> dict[tuple[str, str], Manifest]:
        """Returns rendered manifests by kind and name. Raises RenderError."""
        texts = self.files(values, chart=chart, name=name)
        texts.pop("NOTES.txt")
        documents = [doc for text in texts.values() for doc in yaml.safe_load_all(text) if doc]
        found = {(doc["kind"], doc["metadata"]["name"]): doc for doc in documents}
        assert len(found) == len(documents), "two manifests have the same kind and name"
        return found

    def _call(self, verb: str, values: Manifest, chart: Path, name: str) -> Manifest:
        assert self._process.stdin is not None and self._process.stdout is not None
        call = {"verb": verb, "chart": str(chart), "values": values, "name": name}
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        answer: Manifest = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RenderError(answer["error"])
        return answer


def load(path: Path) -> Manifest:
    """Reads one YAML file."""
    values: Manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def merged(base: Manifest, over: Manifest) -> Manifest:
    """Merges ``over`` into ``base`` as Helm merges values: mappings deeply, everything else as a whole."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


DEFAULTS = load(CHART / "values.yaml")


def strict_crd_schema(path: Path) -> Manifest:
    """Returns the v1 schema of a CRD, refusing unknown fields, which an API server would drop in silence."""
    crd = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    # Left to the API server by the CRD.
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _strict(schema: Manifest) -> Manifest:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return {}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {key: value for key, value in schema.items() if key != "description"}
    properties = schema.get("properties", {})
    if properties:
        result["properties"] = {name: _strict(value) for name, value in properties.items()}
        result.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(result.get(key), dict):
            result[key] = _strict(result[key])
    # Defaults are filled in before required fields are checked.
    result["required"] = [
        name for name in schema.get("required", ()) if "default" not in properties.get(name, {})
    ]
    return result


BIG = load(CHART / "examples" / "one-small-eight-big.yaml")
RAY_SERVICE = ("RayService", "demo-specray")
each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def ray_service(helm: Renderer, values: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = helm.objects(merged(IMAGE, values))[RAY_SERVICE]["spec"]
    return spec


def pod_specs(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = spec["rayClusterConfig"]
    groups = {group["groupName"]: group["template"]["spec"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"]["spec"], **groups}
