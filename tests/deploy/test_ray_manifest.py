"""The RayService: what its numbers must agree on, and that it starts what we have."""

from __future__ import annotations

import copy
import sys
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.ray import __main__ as ray_command
from server.cli import exit_codes as exits
from server.cli.settings import load
from tests.deploy.render import RAY as OVERLAY
from tests.deploy.render import ROOT, by_name, kustomize, validate

RAY = ROOT / "deploy" / "ray"
SERVICE = yaml.safe_load((RAY / "rayservice.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
[APPLICATION] = SERVE["applications"]
[WORKERS] = CLUSTER["workerGroupSpecs"]
PODS = [CLUSTER["headGroupSpec"]["template"], WORKERS["template"]]
OUR_OWN = {"min_replicas", "max_replicas", "routing"}  # of deploy.ray.app.plan


def test_kubernetes_and_kuberay_take_the_overlay() -> None:
    things = by_name(kustomize(OVERLAY))
    for thing in things.values():
        validate(thing)
    assert {kind for kind, _ in things} == {"RayService", "NetworkPolicy"}
    misspelt = copy.deepcopy(things["RayService", "penstock"])
    misspelt["spec"]["rayClusterConfig"]["authOption"] = {"mode": "token"}
    with pytest.raises(jsonschema.ValidationError):
        validate(misspelt)


def test_without_ray_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    for name in ray_command.ON_THIS_MACHINE:
        monkeypatch.setenv(name, "")
    assert ray_command.main() == exits.BAD_CONFIG
    said = capsys.readouterr().err
    assert said == "penstock: ray is not installed: pip install 'penstock[ray]'\n"


def test_the_arguments_are_settings() -> None:
    arguments = {k: v for k, v in APPLICATION["args"].items() if k not in OUR_OWN}
    config, engine_config, warnings = load(arguments, {}, None)
    assert not warnings
    assert config.host == SERVE["http_options"]["host"] == "0.0.0.0"
    assert engine_config.threads == int(WORKERS["rayStartParams"]["num-cpus"])


def test_a_pod_is_as_large_as_the_replica_in_it() -> None:
    [container] = WORKERS["template"]["spec"]["containers"]
    assert int(container["resources"]["requests"]["cpu"]) == APPLICATION["args"]["threads"]
    assert WORKERS["minReplicas"] == APPLICATION["args"]["min_replicas"]
    assert WORKERS["maxReplicas"] == APPLICATION["args"]["max_replicas"]


def test_a_pod_that_goes_outlives_the_drain() -> None:
    drain = APPLICATION["args"]["drain_timeout"]
    assert WORKERS["template"]["spec"]["terminationGracePeriodSeconds"] >= drain + 15
    assert SERVICE["spec"]["rayClusterDeletionDelaySeconds"] >= drain + 15


def test_the_import_path_and_the_version_are_ours() -> None:
    module, _, name = APPLICATION["import_path"].partition(":")
    assert f"def {name}(" in (ROOT / (module.replace(".", "/") + ".py")).read_text()
    version = CLUSTER["rayVersion"]
    assert f"\nray=={version}\n" in (ROOT / "constraints.txt").read_text()
    assert f"rayproject/ray:{version}-" in (RAY / "Dockerfile").read_text()


@pytest.mark.parametrize("pod", PODS, ids=["head", "worker"])
def test_kubernetes_takes_the_pods(pod: dict[str, Any]) -> None:
    metadata = {"name": "tried", **pod["metadata"]}
    thing = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}
    validate(thing)
    misspelt = {**pod["spec"], "terminationGraceSeconds": 5}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(thing | {"spec": misspelt})


@pytest.mark.parametrize("pod", PODS, ids=["head", "worker"])
def test_pods_are_restricted_and_under_the_policy(pod: dict[str, Any]) -> None:
    [container] = pod["spec"]["containers"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    policy = yaml.safe_load((RAY / "networkpolicy.yaml").read_text())
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    assert wanted.items() <= pod["metadata"]["labels"].items()
