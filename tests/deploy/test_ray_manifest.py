"""The RayService: its numbers are consistent, and it starts the application of deploy.ray."""

from __future__ import annotations

import copy
import sys
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.ray import __main__ as ray_command
from server import exit_codes
from server.settings import load
from tests.deploy.render import RAY as OVERLAY
from tests.deploy.render import ROOT, by_name, kustomize, validate

RAY = ROOT / "deploy" / "ray"
SERVICE = yaml.safe_load((RAY / "rayservice.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
[APPLICATION] = SERVE["applications"]
[WORKERS] = CLUSTER["workerGroupSpecs"]
PODS = [CLUSTER["headGroupSpec"]["template"], WORKERS["template"]]
OUR_OWN = {"min_replicas", "max_replicas", "routing"}  # read by deploy.ray.app.plan


def test_ray_overlay_matches_schemas_of_kubernetes_and_kuberay() -> None:
    things = by_name(kustomize(OVERLAY))
    for thing in things.values():
        validate(thing)
    assert {kind for kind, _ in things} == {"RayService", "NetworkPolicy"}
    misspelt = copy.deepcopy(things["RayService", "penstock"])
    misspelt["spec"]["rayClusterConfig"]["authOption"] = {"mode": "token"}
    with pytest.raises(jsonschema.ValidationError):
        validate(misspelt)


def test_ray_command_without_ray_prints_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if Ray were not installed
    for name in ray_command.ON_THIS_MACHINE:
        monkeypatch.setenv(name, "")
    assert ray_command.main() == exit_codes.BAD_CONFIG
    said = capsys.readouterr().err
    assert said == "penstock: ray is not installed: pip install 'penstock[ray]'\n"


def test_rayservice_arguments_are_valid_settings() -> None:
    arguments = {k: v for k, v in APPLICATION["args"].items() if k not in OUR_OWN}
    config, engine_config, warnings = load(arguments, {}, None)
    assert not warnings
    assert config.host == SERVE["http_options"]["host"] == "0.0.0.0"
    assert engine_config.threads == int(WORKERS["rayStartParams"]["num-cpus"])


def test_worker_pod_has_resources_of_one_replica() -> None:
    [container] = WORKERS["template"]["spec"]["containers"]
    assert int(container["resources"]["requests"]["cpu"]) == APPLICATION["args"]["threads"]
    assert WORKERS["minReplicas"] == APPLICATION["args"]["min_replicas"]
    assert WORKERS["maxReplicas"] == APPLICATION["args"]["max_replicas"]


def test_worker_grace_period_outlasts_drain_timeout() -> None:
    drain = APPLICATION["args"]["drain_timeout"]
    assert WORKERS["template"]["spec"]["terminationGracePeriodSeconds"] >= drain + 15
    assert SERVICE["spec"]["rayClusterDeletionDelaySeconds"] >= drain + 15


def test_rayservice_import_path_exists_and_ray_versions_agree() -> None:
    module, _, name = APPLICATION["import_path"].partition(":")
    assert f"def {name}(" in (ROOT / (module.replace(".", "/") + ".py")).read_text()
    version = CLUSTER["rayVersion"]
    assert f"\nray=={version}\n" in (ROOT / "constraints.txt").read_text()
    assert f"rayproject/ray:{version}-" in (RAY / "Dockerfile").read_text()


@pytest.mark.parametrize("pod", PODS, ids=["head", "worker"])
def test_ray_pods_match_kubernetes_schema(pod: dict[str, Any]) -> None:
    metadata = {"name": "tried", **pod["metadata"]}
    thing = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}
    validate(thing)
    misspelt = {**pod["spec"], "terminationGraceSeconds": 5}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(thing | {"spec": misspelt})


@pytest.mark.parametrize("pod", PODS, ids=["head", "worker"])
def test_ray_pods_are_restricted_and_selected_by_network_policy(pod: dict[str, Any]) -> None:
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
