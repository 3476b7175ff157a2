"""Render Kubernetes objects with kubectl and Helm, validate and compare them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
CHART = ROOT / "deploy" / "helm" / "penstock"
EXAMPLES = sorted((ROOT / "deploy" / "helm" / "examples").glob("*.yaml"))
RAY = K8S / "overlays" / "ray"  # has no Deployment; test_ray_manifest.py tests it
OVERLAYS = [K8S / "base", *sorted(set((K8S / "overlays").iterdir()) - {RAY})]
COMPONENTS = sorted((K8S / "components").iterdir())
SCHEMAS = Path(__file__).with_name("schemas")
OLDEST = "1.32"  # the oldest Kubernetes of the validator; also kubectl's version here

Object = dict[str, Any]


def kustomize(folder: Path) -> list[Object]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl to render kustomizations")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def helm(values: Object, name: str = "penstock") -> list[Object]:
    """Render the chart as release `name`. Raises HelmError if the schema rejects `values`."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values, name=name, namespace="default")
    documents = (document for text in files.values() for document in yaml.safe_load_all(text))
    return [document for document in documents if document]


def validate(thing: Object) -> None:
    """Raise ValidationError if Kubernetes would reject the object or drop one of its fields."""
    schema = SCHEMAS / f"{thing['kind']}.json"
    if schema.exists():
        jsonschema.validate(thing, json.loads(schema.read_text()))
        return
    for version in (OLDEST, kubernetes_validate.latest_version()):
        kubernetes_validate.validate(thing, version, strict=True)


def by_name(things: list[Object]) -> dict[tuple[str, str], Object]:
    """Return the objects by kind and name. Fails if two objects share both."""
    found = {(thing["kind"], thing["metadata"]["name"]): thing for thing in things}
    assert len(found) == len(things)
    return found


def comparable(things: list[Object]) -> dict[tuple[str, str], Object]:
    """Return the objects by kind and name, without differences that have no meaning.

    kustomize appends the hash of the settings to the ConfigMap's name; the chart writes it into an
    annotation of the pods. Only the chart's queries contain the namespace. The order of volumes has
    no meaning.
    """
    text = json.dumps(things).replace('namespace=\\"default\\", ', "")
    plain = by_name(json.loads(re.sub(r"penstock-config-[a-z0-9]{10}", "penstock-config", text)))
    for (kind, _), thing in plain.items():
        if kind == "Deployment":
            thing["spec"]["template"]["spec"]["volumes"].sort(key=lambda volume: volume["name"])
            metadata = thing["spec"]["template"]["metadata"]
            metadata.get("annotations", {}).pop("checksum/config", None)
            if not metadata.get("annotations"):
                metadata.pop("annotations", None)
        elif kind == "ConfigMap":
            thing["data"] = {name: yaml.safe_load(text) for name, text in thing["data"].items()}
    return plain


def pods(things: list[Object]) -> list[tuple[Object, Object]]:
    """Return (workload, pod template) of all objects that create pods."""
    kinds = ("Deployment", "Job", "StatefulSet", "DaemonSet")
    return [(thing, thing["spec"]["template"]) for thing in things if thing["kind"] in kinds]
