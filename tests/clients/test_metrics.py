"""Metrics of worlds that have served, checked against promtool, Triton, the documentation and the dashboard."""

import json
import os
import re
import shutil
import subprocess
import time

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

import metrics_page
from triton_requests import QUESTION, STORY, stream, text_inputs
from conftest import ROOT, free_ports, launch
from serving import IDENTITY, rank

PROMTOOL = shutil.which("promtool") or str(ROOT / ".cache/promtool/promtool")
needs_promtool = pytest.mark.skipif(not os.access(PROMTOOL, os.X_OK), reason="no promtool; scripts/install_promtool fetches it")

# Family, type and labels of tritonserver 2.51 on a machine without GPUs, with a response cache and all of --metrics-config.
TRITON = {
    "counter": "nv_inference_request_success nv_inference_count nv_inference_exec_count nv_inference_request_duration_us "
    "nv_inference_queue_duration_us nv_inference_compute_input_duration_us nv_inference_compute_infer_duration_us "
    "nv_inference_compute_output_duration_us nv_cache_num_hits_per_model nv_cache_hit_duration_per_model "
    "nv_cache_num_misses_per_model nv_cache_miss_duration_per_model",
    "summary": "nv_inference_request_summary_us nv_inference_queue_summary_us nv_inference_compute_input_summary_us "
    "nv_inference_compute_infer_summary_us nv_inference_compute_output_summary_us nv_cache_hit_summary_per_model "
    "nv_cache_miss_summary_per_model",
    "gauge": "nv_inference_pending_request_count",
}
TRITON_OF_SERVER = (
    "nv_pinned_memory_pool_total_bytes nv_pinned_memory_pool_used_bytes nv_cpu_utilization nv_cpu_memory_total_bytes "
    "nv_cpu_memory_used_bytes nv_cache_util nv_cache_num_entries nv_cache_num_hits nv_cache_num_misses nv_cache_num_lookups "
    "nv_cache_num_evictions nv_cache_lookup_duration nv_cache_insertion_duration"
)

CACHED = IDENTITY + 'response_cache { enable: true } metric_tags { key: "team" value: "a" }'
ALL_LATENCIES = [f"--metrics-config={kind}_latencies=true" for kind in ("counter", "histogram", "summary")]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The metrics page of a world of two ranks after four requests: two equal ones, a long one, and one that is refused. Its model has
    an adapter."""
    repository = tmp_path_factory.mktemp("served") / "model_repository"
    shutil.copytree(ROOT / "model_repository", repository)
    with (repository / "tensorrt_llm/config.pbtxt").open("a") as config:
        config.write('parameters { key: "lora_modules" value: { string_value: "demo=%s" } }\n' % (ROOT / "tests/goldens/adapters/demo"))
    http, grpc, metrics = free_ports(3)
    flags = [f"--http_port={http}", f"--grpc_port={grpc}", f"--metrics_port={metrics}", "--device=cpu", "--oversubscribe"]
    of_ranks = ["--", "--metrics-config=histogram_latencies=true"]
    started = launch("--world_size=2", f"--model_repo={repository}", "--detach", *flags, *of_ranks)
    assert started.returncode == 0, started.stderr
    try:
        with grpcclient.InferenceServerClient(f"localhost:{grpc}") as client:
            for prompt, max_tokens in [(QUESTION * 3, 8), (QUESTION * 3, 8), (STORY, 40)]:
                pieces, error = stream(client, text_inputs(prompt, max_tokens, True))
                assert pieces and error is None
            assert stream(client, text_inputs(STORY, -1, True))[1] is not None
        yield settled_page(f"localhost:{metrics}")
    finally:
        stopped = launch("stop", f"--http_port={http}")
    assert stopped.returncode == 0, stopped.stderr


def settled_page(address: str) -> str:
    """The metrics page after the last step and request are counted, which happens shortly after the last response."""
    deadline = time.monotonic() + 60
    while True:
        text = metrics_page.page(address)
        found = metrics_page.families(text)
        steps = found["trireme_llm_step_seconds"].value("_count") == found["trireme_llm_steps_total"].value()
        if steps and found["trireme_llm_request_seconds"].value("_count") == 3:
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """Two metrics pages, one later than the other, of a rank with a response cache and all latencies, after a miss and a hit."""
    flags = [*ALL_LATENCIES, "--metrics-config=summary_quantiles=0.5:0.05,0.9:0.01", "--cache-config=local,size=1048576"]
    with rank(tmp_path_factory.mktemp("cached"), *flags, "--metrics-interval-ms=1", prefix="metrics", identity=CACHED, plain=IDENTITY) as one:
        with httpclient.InferenceServerClient(one.http) as client:
            tensor = httpclient.InferInput("INPUT0", [2], "FP32")
            tensor.set_data_from_numpy(np.array([1, 2], dtype=np.float32))
            for name in ("identity", "identity", "plain"):
                client.infer(name, [tensor])
        metrics_page.page(one.metrics)
        return metrics_page.page(one.metrics)


@needs_promtool
def test_promtool_objects_only_to_names_of_triton_and_vllm(served, cached):
    for text in (served, cached):
        checked = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        findings = (checked.stdout + checked.stderr).split("\n")
        assert checked.returncode in (0, 3), findings  # 3: the page is valid, with advice about names.
        assert not [line for line in findings if line and not line.startswith(("nv_", "vllm:"))], findings
    own = "".join(re.findall(r"(?m)^(?:# (?:HELP|TYPE) )?trireme_.*\n", served))
    assert subprocess.run([PROMTOOL, "check", "metrics"], input=own, text=True, timeout=60).returncode == 0


def test_families_types_and_labels_are_those_of_tritonserver(cached):
    found = metrics_page.families(cached)
    for kind, names in TRITON.items():
        for name in names.split():
            assert found[name].kind == kind, name
            assert found[name].labels == {"_team", "model", "version"}, name
    for name in TRITON_OF_SERVER.split():
        assert (found[name].kind, found[name].labels) == ("gauge", set()), name
    assert found["nv_inference_request_failure"].labels == {"_team", "model", "version", "reason"}
    counts = {name: found[name].value(model="identity") for name in ("nv_cache_num_hits_per_model", "nv_cache_num_misses_per_model", "nv_inference_request_success", "nv_inference_count")}
    assert list(counts.values()) == [1, 1, 2, 1]
    summary = found["nv_inference_request_summary_us"]
    assert [labels["quantile"] for _, labels, _ in summary.samples if "quantile" in labels and labels["model"] == "plain"] == ["0.5", "0.9"]
    assert summary.value("_count", model="plain") == 1
    assert 0 < summary.value(model="plain", quantile="0.5") <= summary.value("_sum", model="plain")
    assert 0 <= found["nv_cpu_utilization"].value() <= 1


def test_counters_of_language_models_equal_what_clients_received(served):
    found = metrics_page.families(served)
    ended = found["trireme_llm_sequences_ended_total"].value()
    for name in ("time_to_first_token_seconds", "queue_time_seconds", "request_seconds"):
        histogram = found[f"trireme_llm_{name}"]
        assert histogram.value("_count") == ended == 3
        assert histogram.value("_bucket", le="+Inf") == ended
    tokens = found["nv_llm_output_token_len"].value("_sum")
    gaps = found["trireme_llm_inter_token_latency_seconds"].value("_count")
    assert gaps == tokens - ended > 0
    steps = found["trireme_llm_steps_total"].value()
    assert found["trireme_llm_step_phase_seconds"].value("_count", phase="settle") == steps
    hits = found["trireme_llm_prefix_cache_hits_total"].value()
    assert (hits, found["trireme_llm_prefix_cache_lookups_total"].value()) == (1, 3), "the second prompt equals the first"
    workers = {labels["worker"]: labels for _, labels, _ in found["trireme_llm_worker_ready"].samples}
    assert sorted(workers) == ["0", "1"]
    assert all(labels["device"] == "cpu" and os.path.exists(f"/proc/{labels['pid']}") for labels in workers.values())
    assert found["trireme_llm_startup_seconds"].value(phase="total") >= found["trireme_llm_startup_seconds"].value(phase="weights") > 0


def test_statistics_contain_the_memory_of_workers(world):
    with grpcclient.InferenceServerClient(world.grpc) as client:
        [model] = client.get_inference_statistics("tensorrt_llm").model_stats
    with httpclient.InferenceServerClient(world.http) as client:
        [same] = client.get_inference_statistics("tensorrt_llm")["model_stats"]
    assert [(memory.type, memory.id) for memory in model.memory_usage] == [("CPU", 0), ("CPU", 0)], "one for each worker"
    assert all(memory.byte_size > 1 << 20 for memory in model.memory_usage)
    assert same["memory_usage"] == [{"type": "CPU", "id": 0, "byte_size": memory.byte_size} for memory in model.memory_usage]
    found = metrics_page.families(metrics_page.page(f"localhost:{world.metrics_port}"))
    of_workers = found["trireme_llm_worker_memory_bytes"].value()
    assert of_workers == found["nv_trt_llm_runtime_memory_metrics"].value(memory_type="cpu") == sum(memory.byte_size for memory in model.memory_usage)


def test_the_documentation_lists_every_metric_with_its_type_and_labels(served, cached):
    documented = metrics_page.documented()
    found = {**metrics_page.families(cached), **metrics_page.families(served)}
    assert sorted(set(found) - set(documented)) == [], "not in docs/metrics.md"
    absent = [name for name, (_, _, needs_gpu) in documented.items() if name not in found and not needs_gpu]
    assert absent == [], "not served"
    for name, family in found.items():
        kind, labels, _ = documented[name]
        assert (kind, labels) == (family.kind, family.labels - {"_team"}), name


def test_dashboard_and_alerts_use_existing_metrics(served, cached):
    known = {**metrics_page.families(cached), **metrics_page.families(served)}
    known |= {name: None for name, (_, _, needs_gpu) in metrics_page.documented().items() if needs_gpu}
    dashboard = json.loads((ROOT / "monitoring/trireme.dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 30
    expressions += [variable["query"]["query"] for variable in dashboard["templating"]["list"] if isinstance(variable["query"], dict)]
    expressions += (ROOT / "monitoring/trireme.rules.yml").read_text().splitlines()
    for expression in expressions:
        for name in re.findall(r"\b(?:nv|trireme)_[a-z0-9_]+", expression):
            assert name in known or re.sub("_(bucket|sum|count)$", "", name) in known, f"{name} in {expression}"


@needs_promtool
def test_every_query_of_the_dashboard_is_valid(tmp_path):
    dashboard = json.loads((ROOT / "monitoring/trireme.dashboard.json").read_text())
    rules = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$model", ".*")
            assert "$" not in expression
            rules.append({"record": f"panel:{panel['id']}_{target['refId']}", "expr": expression})
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML.
    run = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and f"{len(rules)} rules found" in run.stdout, run.stdout + run.stderr


@needs_promtool
def test_alerts_fire_under_their_conditions_only():
    folder = ROOT / "monitoring"
    for command in (["check", "rules", "trireme.rules.yml"], ["test", "rules", "trireme.rules.test.yml"]):
        run = subprocess.run([PROMTOOL, *command], cwd=folder, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stdout + run.stderr
    alerts = set(re.findall(r"alert: (\w+)", (folder / "trireme.rules.yml").read_text()))
    tested = set(re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", (folder / "trireme.rules.test.yml").read_text()))
    assert alerts == tested, "each alert has a case in which it fires"
