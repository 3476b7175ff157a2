"""Every overlay, component and chart example is valid, restricted and consistent with others."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import helm_python
import jsonschema
import kubernetes_validate
import msgspec
import pytest
import yaml

from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.memory.report import plan_memory
from server.api import ops
from server.cli.main import app as command
from server.config import ServerConfig
from server.http.auth import FORM_BYTES
from server.settings import load
from server.telemetry.tracing import Tracing
from tests.deploy.render import (
    CHART,
    COMPONENTS,
    EXAMPLES,
    K8S,
    OVERLAYS,
    ROOT,
    Object,
    by_name,
    comparable,
    helm,
    kustomize,
    pods,
    validate,
)
from tests.support.model_sizes import MODELS

INVALID = (kubernetes_validate.ValidationError, jsonschema.ValidationError)
ROUTES = {route.path for route in ops.router.routes}  # type: ignore[attr-defined]
SELECTOR = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": "penstock"}


def on_the_base(component: Path, folder: Path, more: Object | None = None) -> list[Object]:
    """Render the base with one component, and with the component that this one needs.

    `more` are further fields of the kustomization.
    """
    shutil.copytree(K8S, folder / "k8s")
    beside = ["monitoring"] if component.name == "api-key" else []
    names = [*beside, component.name]
    document = {"resources": ["../base"], "components": [f"../components/{n}" for n in names]}
    document |= more or {}
    (folder / "k8s" / "tried").mkdir()
    (folder / "k8s" / "tried" / "kustomization.yaml").write_text(json.dumps(document))
    return kustomize(folder / "k8s" / "tried")


@pytest.fixture(scope="module")
def renderings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """Return the objects of every overlay, component and chart example, by its name."""
    found = {f"k8s/{folder.name}": kustomize(folder) for folder in OVERLAYS}
    for component in COMPONENTS:
        folder = tmp_path_factory.mktemp(component.name)
        found[f"component/{component.name}"] = on_the_base(component, folder)
    found["helm/defaults"] = helm({})
    return found | {f"helm/{f.stem}": helm(yaml.safe_load(f.read_text())) for f in EXAMPLES}


@pytest.fixture(scope="module")
def servers(renderings: dict[str, list[Object]]) -> dict[str, Object]:
    """Return the Deployment of each rendering."""
    return {name: by_name(things)["Deployment", "penstock"] for name, things in renderings.items()}


def pod_spec(deployment: Object) -> Object:
    spec = deployment["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


# ---- valid ----------------------------------------------------------------------------------


def test_rendered_objects_match_schemas_of_kubernetes_and_operators(
    renderings: dict[str, list[Object]],
) -> None:
    things = [thing for rendering in renderings.values() for thing in by_name(rendering).values()]
    different = {json.dumps(thing, sort_keys=True): thing for thing in things}.values()
    for thing in different:
        validate(thing)
    kinds = {thing["kind"] for thing in different}
    assert kinds >= {"ScaledObject", "HorizontalPodAutoscaler", "InferencePool", "HTTPRoute"}
    assert kinds >= {"ServiceMonitor", "PrometheusRule", "Ingress", "Job", "NetworkPolicy"}


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Deployment", "spec template spec containers 0 livenessProbe failureThreshold"),
        ("Deployment", "spec template spec containers 0 readinessProbe"),
        ("ServiceMonitor", "spec endpoints 0 interval"),
        ("ScaledObject", "spec triggers 0 metadata threshold"),
        ("PodDisruptionBudget", "spec maxUnavailable"),
    ],
)
def test_validate_misspelt_field_raises(
    kind: str, path: str, renderings: dict[str, list[Object]]
) -> None:
    things = by_name(copy.deepcopy(renderings["k8s/autoscale-keda"]))
    thing: Any = things[kind, "penstock"]
    validate(thing)
    *steps, last = path.split()
    node = thing
    for step in steps:
        node = node[int(step) if step.isdecimal() else step]
    node[last[:-2] + last[-1]] = node.pop(last)  # a letter is missing
    with pytest.raises(INVALID):
        validate(thing)


# ---- chart, overlays and components agree ----------------------------------------------------


def test_chart_with_defaults_equals_base(renderings: dict[str, list[Object]]) -> None:
    chart, base = comparable(renderings["helm/defaults"]), comparable(renderings["k8s/base"])
    assert chart.keys() == base.keys()
    for name, thing in base.items():
        assert chart[name] == thing, name


@pytest.mark.parametrize("example", [f.stem for f in EXAMPLES if f.stem != "full"])
def test_chart_example_equals_overlay_of_same_name(
    example: str, renderings: dict[str, list[Object]]
) -> None:
    """Settings may differ: the chart writes them to the file, overlays to the pod's environment."""
    chart = comparable(renderings[f"helm/{example}"])
    overlay = comparable(renderings[f"k8s/{example}"])
    assert chart.keys() == overlay.keys()
    for (kind, name), thing in overlay.items():
        if kind == "Deployment":
            for each in (thing, chart[kind, name]):
                environment = pod_spec(each)["containers"][0]["env"]
                environment[:] = [v for v in environment if "value" not in v]
        if kind != "ConfigMap":
            assert chart[kind, name] == thing, (kind, name)


@pytest.mark.parametrize("example", ["loadtest", "ingress", "tracing"])
def test_chart_option_equals_component_of_same_name(
    example: str, renderings: dict[str, list[Object]]
) -> None:
    chart = comparable(helm({example: {"enabled": True}}))
    component = comparable(renderings[f"component/{example}"])
    assert chart.keys() == component.keys()
    for name, thing in component.items():
        assert chart[name] == thing, name


def test_prometheus_rule_objects_equal_rules_file(
    renderings: dict[str, list[Object]],
) -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
    for name in ("component/monitoring", "helm/full"):
        assert by_name(renderings[name])["PrometheusRule", "penstock"]["spec"] == rules, (
            "update the copy: see deploy/k8s/components/monitoring/prometheusrule.yaml"
        )


def test_helm_monitoring_runbooks_are_at_the_address_of_the_setting() -> None:
    page = "https://wiki.example/penstock"
    things = helm({"monitoring": {"enabled": True, "runbooks": page}})
    rules = by_name(things)["PrometheusRule", "penstock"]["spec"]["groups"][0]["rules"]
    urls = [rule["annotations"]["runbook_url"] for rule in rules]
    assert urls == [f"{page}#{rule['alert'].lower()}" for rule in rules]


def test_kustomize_runbooks_are_at_the_address_of_the_documented_replacement(
    tmp_path: Path,
) -> None:
    component = K8S / "components" / "monitoring"
    head = (component / "kustomization.yaml").read_text()
    comment = re.findall(r"^#   (.*)$", head[head.index("#   configMapGenerator") :], re.MULTILINE)
    lines = "\n".join(line for line in comment if not line.startswith("kubectl"))
    things = on_the_base(component, tmp_path, yaml.safe_load(lines))
    rules = by_name(things)["PrometheusRule", "penstock"]["spec"]["groups"][0]["rules"]
    urls = [rule["annotations"]["runbook_url"] for rule in rules]
    page = "https://wiki.example.com/penstock"
    assert urls == [f"{page}#{rule['alert'].lower()}" for rule in rules]


# ---- settings and routes of the server ------------------------------------------------------


def settings_of(things: list[Object], folder: Path) -> Any:
    """Return the settings that the server of a rendering reads, and its container."""
    [config] = [thing for thing in things if thing["kind"] == "ConfigMap"]
    (folder / "config.yaml").write_text(config["data"]["config.yaml"])
    container = pod_spec(by_name(things)["Deployment", "penstock"])["containers"][0]
    environment = {v["name"]: v["value"] for v in container["env"] if "value" in v}
    server, engine, warnings = load({}, environment, folder / "config.yaml")
    assert not warnings
    return server, engine, container


def test_rendered_settings_are_valid_and_fit_the_pod(
    renderings: dict[str, list[Object]], tmp_path: Path
) -> None:
    for name, things in renderings.items():
        server, engine, container = settings_of(things, tmp_path)
        grace = pod_spec(by_name(things)["Deployment", "penstock"])["terminationGracePeriodSeconds"]
        pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert grace == pre_stop + server.drain_timeout + 15, name
        if "gpu" not in name:
            assert str(engine.threads) == container["resources"]["requests"]["cpu"], name
        assert server.metrics_compat == ("vllm" if "gateway" in name else "none")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_planned_memory_of_the_served_model_fits_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Literal["bfloat16", "float32"]
) -> None:
    """With the model of the base, in a container that has nothing else in it."""
    _, config, container = settings_of(kustomize(K8S / "base"), tmp_path)
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    model = {**MODELS["SmolLM2-135M"], "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = msgspec.structs.replace(config, model=str(tmp_path), device="cpu", dtype=dtype)
    monkeypatch.setattr("engine.memory.model_plan.machine_memory", lambda: limit)
    monkeypatch.setattr("engine.memory.model_plan.is_memory_limited", lambda: True)
    monkeypatch.setattr("engine.memory.report.available_memory", lambda device: limit)
    plan = plan_memory(ModelPlan(config))
    assert sum(plan.planned.values()) <= limit
    assert plan.max_model_len == model["max_position_embeddings"]


def test_init_container_pulls_served_model(
    renderings: dict[str, list[Object]], tmp_path: Path
) -> None:
    for name, things in renderings.items():
        _, engine, _ = settings_of(things, tmp_path)
        spec = pod_spec(by_name(things)["Deployment", "penstock"])
        mounts = {m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
        assert mounts == {"/etc/penstock", "/models", "/cache"}
        if name == "helm/full":
            assert "initContainers" not in spec
            continue
        [pull] = spec["initContainers"]
        verb, model, flag, revision = pull["args"]
        assert (verb, flag) == ("pull", "--revision")
        folder = f"hub/models--{model.replace('/', '--')}/snapshots/{revision}"
        assert engine.model == f"/models/{folder}"


def test_probe_paths_and_container_commands_exist(servers: dict[str, Object]) -> None:
    commands = {c.name or c.callback.__name__ for c in command.registered_commands if c.callback}
    for deployment in servers.values():
        spec = pod_spec(deployment)
        [container] = spec["containers"]
        probes = [container[f"{p}Probe"]["httpGet"] for p in ("startup", "liveness", "readiness")]
        assert {probe["path"] for probe in probes} <= ROUTES
        assert {probe["port"] for probe in probes} == {p["name"] for p in container["ports"]}
        for each in [container, *spec.get("initContainers", [])]:
            assert each["args"][0] in commands


def test_readiness_probe_ignores_overload(servers: dict[str, Object]) -> None:
    """/ready answers 503 with a full queue, so a probe of it would remove all pods at once."""
    for deployment in servers.values():
        [container] = pod_spec(deployment)["containers"]
        paths = {p: container[f"{p}Probe"]["httpGet"]["path"] for p in ("startup", "readiness")}
        assert paths == {"startup": "/ready", "readiness": "/health"}


# ---- privileges and network access ----------------------------------------------------------


def test_pods_meet_restricted_security_standard(renderings: dict[str, list[Object]]) -> None:
    """Kubernetes' Pod Security Standard "restricted", and a read-only root file system."""
    for things in renderings.values():
        for _, template in pods(things):
            spec = template["spec"]
            assert spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["runAsNonRoot"]
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                rights = container["securityContext"]
                assert rights["allowPrivilegeEscalation"] is False
                assert rights["capabilities"] == {"drop": ["ALL"]}
                assert rights["readOnlyRootFilesystem"] is True
                assert "memory" in container["resources"]["limits"]
                assert container["resources"]["requests"].keys() >= {"cpu", "memory"}


def test_selectors_match_server_pods_only(
    renderings: dict[str, list[Object]],
) -> None:
    for things in renderings.values():
        for thing in things:
            spec = thing.get("spec", {})
            selector = spec.get("selector") or spec.get("podSelector")
            if thing["kind"] == "ServiceMonitor":
                [service] = [
                    other
                    for other in things
                    if other["kind"] == "Service"
                    and selector["matchLabels"].items() <= other["metadata"]["labels"].items()
                ]
                assert service["metadata"]["name"] == "penstock-pods"
            elif selector is not None:
                assert selector.get("matchLabels", selector) == SELECTOR
        for workload, template in pods(things):
            labels = template["metadata"]["labels"]
            assert (labels.items() >= SELECTOR.items()) == (workload["kind"] == "Deployment")
            assert workload["kind"] == "Deployment" or labels["penstock-client"] == "true"


def test_deployment_with_autoscaler_sets_no_replicas(servers: dict[str, Object]) -> None:
    for name, deployment in servers.items():
        assert ("replicas" in deployment["spec"]) != ("autoscale" in name), name


def test_keda_fallback_has_average_value_triggers_only(renderings: dict[str, list[Object]]) -> None:
    """KEDA rejects a fallback if a trigger is of another type; its schema does not say so."""
    for name in ("k8s/autoscale-keda", "helm/autoscale-keda"):
        spec = by_name(renderings[name])["ScaledObject", "penstock"]["spec"]
        assert {trigger["metricType"] for trigger in spec["triggers"]} == {"AverageValue"}
        for trigger in spec["triggers"]:
            assert trigger["metadata"]["query"].startswith("sum("), "AverageValue is per replica"
        assert spec["fallback"]["behavior"] == "currentReplicasIfHigher", "it may not scale down"


@pytest.mark.parametrize("release", ["penstock", "llm"])
def test_alerts_and_scalers_for_any_release_select_scraped_series(release: str) -> None:
    values = {"monitoring": {"enabled": True}, "autoscaling": {"by": "keda"}}
    things = by_name(helm(values, release))
    monitor = things["ServiceMonitor", release]["spec"]
    service = things["Service", f"{release}-pods"]["metadata"]
    job = service["labels"][monitor["jobLabel"]]
    for group in things["PrometheusRule", release]["spec"]["groups"]:
        for pattern in re.findall('job=~"([^"]*)"', json.dumps(group).replace(r"\"", '"')):
            assert re.fullmatch(pattern, job)
    for trigger in things["ScaledObject", release]["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        assert f'{{namespace="default", service="{service["name"]}"}}' in query


def test_ingress_and_gateway_paths_exclude_metrics_and_probes(
    renderings: dict[str, list[Object]],
) -> None:
    seen = 0
    for thing in (thing for things in renderings.values() for thing in things):
        paths = []
        for rule in thing.get("spec", {}).get("rules", []):
            if thing["kind"] == "Ingress":
                paths += [path["path"] for path in rule["http"]["paths"]]
            elif thing["kind"] == "HTTPRoute":
                paths += [match["path"]["value"] for match in rule["matches"]]
        seen += len(paths)
        assert not [r for r in ROUTES for path in paths if f"{r}/".startswith(path.rstrip("/"))]
    assert seen > 3


@pytest.mark.parametrize("name", ["component/ingress", "helm/full"])
def test_ingress_of_stored_things_admits_whole_files_and_sends_a_key_to_one_pod(
    name: str, renderings: dict[str, list[Object]]
) -> None:
    prefix = "nginx.ingress.kubernetes.io/"
    ingresses = {}
    for thing in renderings[name]:
        if thing["kind"] == "Ingress":
            [rule] = thing["spec"]["rules"]
            notes = thing["metadata"]["annotations"]
            for path in rule["http"]["paths"]:
                ingresses[path["path"]] = notes
    assert ingresses.keys() == {"/v1", "/v1/files", "/v1/batches", "/v1/responses"}
    config = ServerConfig()
    for path, notes in ingresses.items():
        size = int(notes[f"{prefix}proxy-body-size"].removesuffix("m")) << 20
        is_stored = path != "/v1"
        assert (f"{prefix}upstream-hash-by" in notes) == is_stored
        assert (notes[f"{prefix}proxy-next-upstream"] == "off") == is_stored
        if is_stored:
            assert size >= config.max_upload_bytes + FORM_BYTES
        else:
            assert size == config.max_body_bytes


def test_chart_with_pull_secret_annotation_and_env_renders_them() -> None:
    variable = {"name": "ONEDNN_MAX_CPU_ISA", "value": "AVX512_CORE_BF16"}
    values = {
        "imagePullSecrets": [{"name": "my-registry"}],
        "podAnnotations": {"example.com/owner": "us"},
        "env": [variable],
    }
    deployment = by_name(helm(values))["Deployment", "penstock"]
    template = deployment["spec"]["template"]
    assert template["metadata"]["annotations"].keys() == {"checksum/config", "example.com/owner"}
    assert template["spec"]["imagePullSecrets"] == values["imagePullSecrets"]
    for container in (*template["spec"]["initContainers"], *template["spec"]["containers"]):
        assert variable in container["env"], container["name"]
    validate(deployment)


def test_chart_with_labels_and_tls_secret_renders_them() -> None:
    labels = {"release": "kube-prometheus-stack"}
    monitoring = by_name(helm({"monitoring": {"enabled": True, "labels": labels}}))
    for kind in ("ServiceMonitor", "PrometheusRule"):
        found = monitoring[kind, "penstock"]
        validate(found)
        assert found["metadata"]["labels"] == SELECTOR | labels
    ingress = by_name(helm({"ingress": {"enabled": True, "tlsSecret": "mine"}}))
    validate(ingress["Ingress", "penstock"])
    [tls] = ingress["Ingress", "penstock"]["spec"]["tls"]
    assert tls == {"hosts": ["penstock.example.com"], "secretName": "mine"}


def test_required_api_key_is_mandatory_and_sent_by_scrapes(
    renderings: dict[str, list[Object]], servers: dict[str, Object]
) -> None:
    for name in ("component/api-key", "helm/full"):
        environment = pod_spec(servers[name])["containers"][0]["env"]
        [key] = [v["valueFrom"] for v in environment if v["name"] == "PENSTOCK_API_KEY"]
        monitor = by_name(renderings[name])["ServiceMonitor", "penstock"]
        [endpoint] = monitor["spec"]["endpoints"]
        assert key["secretKeyRef"]["optional"] is False
        credentials = endpoint["authorization"]["credentials"]
        assert credentials == {"name": key["secretKeyRef"]["name"], "key": "metrics-key"}


@pytest.mark.parametrize("name", ["component/tracing", "helm/full"])
def test_trace_collector_is_allowed_by_network_policy(
    name: str, renderings: dict[str, list[Object]], tmp_path: Path
) -> None:
    server, _, container = settings_of(renderings[name], tmp_path)
    assert server.tracing
    environment = {v["name"]: v.get("value") for v in container["env"]}
    Tracing.from_environment(environment).close()
    collector = urlsplit(environment["OTEL_EXPORTER_OTLP_ENDPOINT"])
    namespace = collector.hostname.split(".")[1]
    policy = by_name(renderings[name])["NetworkPolicy", "penstock"]
    [rule] = [r for r in policy["spec"]["egress"] if {"port": collector.port} in r["ports"]]
    [target] = rule["to"]
    labels = {"kubernetes.io/metadata.name": namespace}
    assert target == {"namespaceSelector": {"matchLabels": labels}}


# ---- the chart's values ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"drainSecond": 5},
        {"drainSeconds": "5"},
        {"image": {"tags": "cpu"}},
        {"model": {"revision": "main"}},
        {"config": {"drain_timeout": 5}},
        {"autoscaling": {"by": "magic"}},
        {"tracing": {"ratio": 10}},
    ],
    ids=json.dumps,
)
def test_chart_with_invalid_value_fails(values: Object) -> None:
    with pytest.raises(helm_python.HelmError):
        helm(values)


def test_chart_values_contain_every_name_of_the_schema() -> None:
    def names(schema: Object) -> Any:
        inner = schema.get("properties")
        return {n: names(s) for n, s in inner.items() if n != "global"} if inner else None

    def shape(schema: Any, value: Any) -> Any:
        return {n: shape(s, value[n]) for n, s in schema.items()} if schema else None

    schema = names(json.loads((CHART / "values.schema.json").read_text()))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert shape(schema, values) == schema


@pytest.mark.parametrize("drain", [0, 30, 600])
def test_chart_grace_period_follows_drain_seconds(drain: int, tmp_path: Path) -> None:
    things = helm({"drainSeconds": drain, "preStopSeconds": 5})
    server, _, _ = settings_of(things, tmp_path)
    spec = pod_spec(by_name(things)["Deployment", "penstock"])
    assert server.drain_timeout == drain
    assert spec["terminationGracePeriodSeconds"] == 5 + drain + 15


@pytest.mark.parametrize(("time", "seconds"), [("90s", 90), ("20m", 1200), ("1h30m08s", 5408)])
def test_chart_load_test_deadline_follows_run_time(time: str, seconds: int) -> None:
    things = by_name(helm({"loadtest": {"enabled": True, "runTime": time}}))
    validate(things["Job", "penstock-loadtest"])
    spec = things["Job", "penstock-loadtest"]["spec"]
    assert spec["activeDeadlineSeconds"] == seconds + 780


def test_chart_config_is_validated_by_server_and_restarts_pods(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_sequence"):
        settings_of(helm({"config": {"max_num_sequences": 4}}), tmp_path)
    annotations = [
        pod_spec_annotations(helm(values))
        for values in ({}, {"config": {"max_num_seqs": 4}}, {"replicas": 3})
    ]
    assert annotations[0] != annotations[1], "a changed setting restarts the pods"
    assert annotations[0] == annotations[2]
    assert re.fullmatch("[0-9a-f]{64}", annotations[0]["checksum/config"])


def pod_spec_annotations(things: list[Object]) -> dict[str, str]:
    metadata = by_name(things)["Deployment", "penstock"]["spec"]["template"]["metadata"]
    annotations = metadata["annotations"]
    assert isinstance(annotations, dict)
    return annotations
