"""The Helm chart, rendered by Helm's own library, and the plain manifests."""

import re
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml
from helm_python import HelmError
from helm_python.chart import Chart, lint

from conftest import BINARIES, ROOT

CHART = ROOT / "packaging/helm/trireme"
VERSIONS = ["1.27", "1.37"]
EVERYTHING = {
    "replicas": 2,
    "models": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
    "world": {"ranksPerPod": 4, "exitTimeoutSeconds": 120, "serverFlags": ["--max-connections=100"], "launchFlags": ["--liveness-timeout=30"]},
    "resources": {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"memory": "64Gi"}},
    "apiKeys": {"secret": "keys"},
    "hub": {"secret": "hub"},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "inferencePool": {"enabled": True},
    "probes": {"readiness": "grpc"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "imagePullSecrets": [{"name": "registry"}],
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "b"},
    "extraEnv": [{"name": "RUST_LOG", "value": "info"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "serviceAccountName": "trireme",
}
MANY = {"manyNodes": {"enabled": True, "podsPerGroup": 3}}
CASES = {"default": {}, "everything": EVERYTHING, "many nodes": {**EVERYTHING, **MANY}, "cpu": {"world": {"device": "cpu"}}}


def render(values):
    """The objects of the chart by kind."""
    with Chart.load(CHART) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name="one")
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return {item["kind"]: item for text in texts for item in yaml.safe_load_all(text) if item}


def pods(objects):
    """The pod templates: one, or those of leader and worker."""
    if "Deployment" in objects:
        return [objects["Deployment"]["spec"]["template"]]
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


def container(pod):
    (found,) = pod["spec"]["containers"]
    return found


def test_helm_lint_has_no_remarks():
    report = lint(CHART, strict=True)
    remarks = [message for message in report["messages"] if message["error"] != "icon is recommended"]
    assert not remarks and not report["errors"], report


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_objects_follow_the_schemas_of_kubernetes(values):
    objects = render(values)
    for version in VERSIONS:
        for kind in {"Deployment", "Service"} & set(objects):
            kubernetes_validate.validate(objects[kind], version, strict=True)
        for pod in pods(objects):
            kubernetes_validate.validate({"apiVersion": "v1", "kind": "PodTemplate", "template": pod}, version, strict=True)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_a_pod_has_time_for_its_requests_before_it_is_killed(values):
    pod = pods(render(values))[0]
    words = container(pod)["args"]
    (exit_timeout,) = [int(word.split("=")[1]) for word in words if word.startswith("--exit_timeout=")]
    pause = int(container(pod)["lifecycle"]["preStop"]["exec"]["command"][1])
    # `launch` needs ten seconds beyond the time for requests.
    assert pod["spec"]["terminationGracePeriodSeconds"] >= pause + exit_timeout + 10


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_launch_accepts_the_arguments_of_the_chart(values, tmp_path):
    words = container(pods(render(values))[0])["args"]
    hosts = ["--hosts=a:4,b:4,c:4"] if values.get("manyNodes") else []
    done = subprocess.run([BINARIES / "launch", "--dry-run", *hosts, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_volumes_and_ports_are_those_that_containers_use():
    for values in CASES.values():
        for pod in pods(render(values)):
            mounts = {mount["name"] for mount in container(pod)["volumeMounts"]}
            assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
            ports = {port["name"] for port in container(pod)["ports"]}
            probes = [container(pod).get(name, {}) for name in ("startupProbe", "livenessProbe", "readinessProbe")]
            assert {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe} <= ports
    memory = pods(render({}))[0]["spec"]["volumes"][0]
    assert memory == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}


def test_gpus_are_asked_for_unless_the_world_runs_on_cpus():
    assert container(pods(render({}))[0])["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    everything = container(pods(render(EVERYTHING))[0])["resources"]
    assert everything["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 4} and everything["requests"]["cpu"] == "4"
    assert container(pods(render(CASES["cpu"]))[0])["resources"] == {}


def test_the_service_of_many_nodes_selects_leaders_only():
    objects = render({**EVERYTHING, **MANY})
    assert objects["Service"]["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert objects["InferencePool"]["spec"]["selector"]["matchLabels"] == objects["Service"]["spec"]["selector"]
    assert objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"] == 3


def test_the_leader_lists_the_hosts_of_its_group(tmp_path):
    leader = container(pods(render({**EVERYTHING, **MANY}))[0])
    for name, text in {"ssh": "#!/bin/sh\nexit 0\n", "launch": '#!/bin/sh\nprintf "%s\\n" "$@"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LWS_LEADER_ADDRESS": "one-0.one.models", "LWS_GROUP_SIZE": "3"}
    environment.update((entry["name"], entry["value"]) for entry in leader["env"] if "value" in entry)
    done = subprocess.run([*leader["command"], *leader["args"]], env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "--hosts=one-0:4,one-0-1.one.models:4,one-0-2.one.models:4", done
    assert lines[1:] == leader["args"] and "--world_size=12" in lines


@pytest.mark.parametrize("values", [{"world": {"ranksPerPod": 0}}, {"world": {"rankPerPod": 1}}, {"probes": {"readiness": "tcp"}}, {"manyNodes": {"podsPerGroup": 1}}])
def test_wrong_values_are_refused(values):
    with pytest.raises(HelmError):
        render(values)


def test_plain_manifests_are_those_of_the_chart():
    done = subprocess.run([sys.executable, ROOT / "scripts/kubernetes_manifests", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_metrics_of_the_endpoint_picker_are_documented_metrics():
    text = (ROOT / "docs/packages.md").read_text()
    metrics = (ROOT / "docs/metrics.md").read_text()
    named = re.findall(r"(nv_trt_llm_\w+)\{(\w+)=(\w+)\}", text)
    assert len(named) >= 3
    for name, label, value in named:
        (row,) = [line for line in metrics.splitlines() if line.startswith(f"| `{name}` ")]
        assert f"`{label}`" in row and f"`{value}`" in row, row
