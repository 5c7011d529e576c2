"""Requests over gRPC, sent by an unmodified tritonclient, are recorded and replayed over gRPC."""

import base64
import json
import queue
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from conftest import BINARIES, ROOT
from serving import rank_of
from triton_requests import ANSWER, QUESTION, STORY, stream, tensor, text_inputs

SERVICE = "/inference.GRPCInferenceService/"
KEY = "a-key-of-gRPC"


def record(folder: Path, *flags: str) -> tuple[list[dict], Path]:
    """Serves four requests over gRPC and records them. Returns the lines of the recording, and its directory."""
    recording = folder / "recording"
    with rank_of(ROOT / "model_repository", folder, f"--record={recording}", *flags, prefix="record") as served:
        with grpcclient.InferenceServerClient(served.grpc) as client:
            pieces, error = stream(client, text_inputs(STORY, 64, True), request_id="of-the-client")
            assert error is None and len(pieces) > 3
            assert client.infer("ensemble", text_inputs(QUESTION, 32, False)).as_numpy("text_output")[0].decode() == ANSWER
            tokens = [tensor("input_ids", [5, 6, 7], np.int32), tensor("input_lengths", [3], np.int32), tensor("request_output_len", [4], np.int32)]
            assert client.infer("tensorrt_llm", tokens).as_numpy("output_ids").size >= 4
            with pytest.raises(InferenceServerException, match="nobody"):
                client.infer("nobody", text_inputs(QUESTION, 1, False))
    (file,) = recording.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()], recording


def replay(recording: Path, folder: Path, *flags: str, served=None) -> tuple[int, dict, str]:
    """Replays a recording against a rank. Returns the exit code, the figures, and what was printed."""
    figures = folder / "figures.json"
    command = [BINARIES / "trireme", "replay", recording, f"--json={figures}", "--speed=100", f"--url={served.http}", f"--grpc-url={served.grpc}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(figures.read_text()) if figures.exists() else {}, done.stdout + done.stderr


def content(body: dict) -> bytes:
    return body["text"].encode() if "text" in body else base64.b64decode(body["base64"])


def served_again(folder: Path, *flags: str):
    folder.mkdir()
    return rank_of(ROOT / "model_repository", folder, *flags, prefix="replay")


def test_requests_over_grpc_are_recorded_and_answered_alike_again(tmp_path):
    lines, recording = record(tmp_path)
    requests = [line["request"] for line in lines if "request" in line]
    assert [request["path"] for request in requests] == [SERVICE + name for name in ("ModelStreamInfer", "ModelInfer", "ModelInfer", "ModelInfer")]
    assert [request["status"] for request in requests] == [0, 0, 0, 5]
    assert all(request["is_whole"] for request in requests)
    first = requests[0]
    assert first["request_id"] == "of-the-client" and first["pieces"] > 3 and first["first_us"] < first["last_us"]
    assert STORY.encode() in content(first["body"]) and b"opposite" in content(requests[1]["reply"])
    assert any("step" in line for line in lines)

    # Another server, which wants a key.
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    key.chmod(0o600)
    with served_again(tmp_path / "again", f"--api-key-file={key}") as served:
        code, figures, said = replay(recording, tmp_path, f"--api-key-file={key}", served=served)
        assert code == 0, said
        assert (figures["sent"], figures["alike"], figures["differences"]) == (4, 4, [])
        assert figures["whole_ms"]["replayed"]["p50"] > 0
        code, figures, said = replay(recording, tmp_path, served=served)
        assert code == 1 and len(figures["differences"]) == 4, said


def test_a_replay_over_grpc_finds_answers_of_other_weights(tmp_path):
    _, recording = record(tmp_path)
    with served_again(tmp_path / "again", "--weight-only-precision=int4") as served:
        code, figures, said = replay(recording, tmp_path, served=served)
    assert code == 1, said
    differing = {difference["id"]: difference["place"] for difference in figures["differences"]}
    assert 3 not in differing and differing[0].startswith("outputs.text_output"), said


def test_a_redacted_recording_of_grpc_has_no_text_and_replays_its_load(tmp_path):
    lines, recording = record(tmp_path, "--record-contents=redacted")
    requests = [line["request"] for line in lines if "request" in line]
    assert all("reply" not in request for request in requests)
    bodies = [content(request["body"]) for request in requests]
    assert all(b"opposite" not in body for body in bodies) and b"xxxx xxxx x xxxx" in bodies[0]
    assert np.array([100] * 3, np.int32).tobytes() in bodies[2]
    with served_again(tmp_path / "again") as served:
        code, figures, said = replay(recording, tmp_path, served=served)
    assert code == 0, said
    assert (figures["sent"], figures["not_compared"]) == (4, 4)


def test_each_request_of_a_stream_is_kept_with_its_own_reply_whole_or_not(tmp_path):
    recording = tmp_path / "recording"
    with rank_of(ROOT / "model_repository", tmp_path, f"--record={recording}", prefix="record") as served:
        answers: queue.Queue = queue.Queue()
        with grpcclient.InferenceServerClient(served.grpc) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer("nobody", text_inputs(STORY, 4, True), request_id="refused")
            assert "nobody" in str(answers.get(timeout=60)[1])
            client.async_stream_infer("ensemble", text_inputs(QUESTION, 4, True), request_id="short", enable_empty_final_response=True)
            while not answers.get(timeout=60)[0].get_response().parameters["triton_final_response"].bool_param:
                pass
            client.async_stream_infer("ensemble", text_inputs(STORY, 400, True, end_id=([-1], np.int32)), request_id="cut-off")
            assert answers.get(timeout=60)[1] is None
            client.stop_stream(cancel_requests=True)
    (file,) = recording.glob("*.jsonl")
    requests = [json.loads(line).get("request") for line in file.read_text().splitlines()]
    kept = {request["request_id"]: request for request in requests if request}
    assert {name: request["is_whole"] for name, request in kept.items()} == {"refused": True, "short": True, "cut-off": False}
    assert b"nobody" in content(kept["refused"]["reply"]) and kept["refused"]["pieces"] == 1
    assert b"text_output" in content(kept["short"]["reply"]) and kept["cut-off"]["pieces"] >= 1
