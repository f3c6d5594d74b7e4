"""Simulated workers answer in the shape of the real ones, as recorded: field order, nulls, chunks, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sim_client import SimClient

from workers.sim.answer import StopText, right_answer
from workers.sim.engine import EngineSettings
from workers.sim.settings import WorkerSettings
from workers.sim.text import Model

RECORDINGS = Path(__file__).parents[1] / "recordings"
INDEX = json.loads((RECORDINGS / "index.json").read_text())
ONLY_IN_033 = {"weight_versions", "remote_registration_generation"}
"""What vLLM 0.33 adds besides; the recordings derived for it lack these."""

OPTIONS: dict[str, dict[str, Any]] = {
    "stock": {},
    "stream-handle": {"streams_handles": True},
    "digest": {"streams_handles": True, "digests_handles": True},
    "derived-0.33": {"vllm_version": "0.33.0"},
}


@pytest.fixture(scope="module")
def sims() -> Iterator[SimClient]:
    engine = EngineSettings(block_size=32, max_model_len=8192)
    model = Model(mean_answer_tokens=1)  # it ends as soon as it may
    decode = [
        WorkerSettings(role="decode", model_name="tiny", engine=engine, model=model, **o) for o in OPTIONS.values()
    ]
    with SimClient([WorkerSettings(role="prefill", model_name="tiny", engine=engine)], decode) as client:
        yield client


def shape(value: Any, key: str = "") -> Any:
    """Keep keys, their order, nulls and the words that mean something; forget the values."""
    if key == "tail":  # as long as the sequence happens to leave it
        return "token ids"
    if isinstance(value, dict) and key == "top_logprobs":  # a completion's: token -> log-probability
        return f"{len(value)} tokens"
    if isinstance(value, dict):
        return [(name, shape(item, name)) for name, item in value.items() if name not in ONLY_IN_033]
    if isinstance(value, list):
        inner = [shape(item, key) for item in value]
        return inner[:1] if all(item == inner[0] for item in inner) else inner
    told = {"object", "finish_reason", "role", "v", "tp_size", "dcp_size", "pp_size", "transfer_mode", "block_size"}
    return value if value is None or key in told or isinstance(value, bool) else type(value).__name__


def stream_shape(body: bytes) -> list[Any]:
    """Return the shape of each event; a run of like events counts once."""
    *events, rest = body.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") for event in events)
    shapes: list[Any] = []
    for event in events:
        new = "[DONE]" if event == b"data: [DONE]" else shape(json.loads(event[6:]))
        if not shapes or shapes[-1] != new:
            shapes.append(new)
    return shapes


def recorded(name: str) -> bytes:
    return (RECORDINGS / f"{name}.http-body").read_bytes()


def names(*folders: str) -> list[str]:
    found = [name for name in INDEX if name.startswith(tuple(f"{folder}/" for folder in folders))]
    # There the two choices happened to end one step apart; the simulated ones end together, as in the other folders.
    found = [name for name in found if name != "digest/chat-stream-two-choices"]
    assert found
    return found


def ask_as_recorded(sims: SimClient, name: str) -> bytes:
    """Send a decode worker what the recorded one got, after the same prefill leg."""
    folder, _, what = name.partition("/")
    known = INDEX[name]
    fields = {key: value for key, value in known["request"].items() if key != "kv_transfer_params"}
    params = known["request"].get("kv_transfer_params")
    if params is not None and params.get("do_remote_prefill"):
        params = sims.prefill_leg(known["path"], fields)["kv_transfer_params"]
    if "stop-string" in what:
        said = sims.text(sims.post(sims.decode[0], known["path"], {**fields, "ignore_eos": True, "stop": []}))
        fields["stop"] = [said[20:22]]
    fields["ignore_eos"] = "stop-token" not in what
    return sims.post(sims.decode[list(OPTIONS).index(folder)], known["path"], {**fields, "kv_transfer_params": params})


@pytest.mark.parametrize("name", names(*OPTIONS))
def test_a_decode_worker_answers_in_the_recorded_shape(sims: SimClient, name: str) -> None:
    answer = ask_as_recorded(sims, name)
    if INDEX[name]["request"]["stream"]:
        assert stream_shape(answer) == stream_shape(recorded(name))
    else:
        assert shape(json.loads(answer)) == shape(json.loads(recorded(name)))


@pytest.mark.parametrize("name", names(*OPTIONS))
def test_json_is_written_as_compactly_as_vllm_does(sims: SimClient, name: str) -> None:
    for body in (ask_as_recorded(sims, name), recorded(name)):
        texts = [event[6:] for event in body.split(b"\n\n") if event.startswith(b"data: {")] or [body]
        for text in texts:
            assert json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")).encode() == text


@pytest.mark.parametrize("name", ["prefill/chat-cold", "prefill/completions-cold"])
def test_a_prefill_worker_answers_a_cold_leg_in_the_recorded_shape(sims: SimClient, name: str) -> None:
    fields = {key: value for key, value in INDEX[name]["request"].items() if key != "kv_transfer_params"}
    assert shape(sims.prefill_leg(INDEX[name]["path"], fields)) == shape(json.loads(recorded(name)))


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_prefill_worker_answers_a_leg_with_a_handle_in_the_recorded_shape(sims: SimClient, api: str) -> None:
    plain = INDEX[f"stock/{api}-full-plain"]
    fields = {key: value for key, value in plain["request"].items() if key != "kv_transfer_params"}
    handle = json.loads(ask_as_recorded(sims, f"stock/{api}-full-plain"))["kv_transfer_params"]
    answer = sims.prefill_leg(plain["path"], fields, handle)
    assert shape(answer) == shape(json.loads(recorded(f"prefill/{api}-with-handle")))


@pytest.mark.parametrize("name", ["prefill/render-chat", "prefill/render-completions", "prefill/models"])
def test_the_other_endpoints_answer_in_the_recorded_shape(sims: SimClient, name: str) -> None:
    known = INDEX[name]
    if known["method"] == "GET":
        answer = sims.get(sims.prefill[0], known["path"])
    else:
        answer = sims.post(sims.prefill[0], known["path"], known["request"])
    expected = shape(json.loads(recorded(name)))
    if name == "prefill/render-completions":  # vLLM leaves out max_tokens where it is the default of 16
        expected = json.loads(
            json.dumps(expected).replace('["stop_token_ids", []], ', '["stop_token_ids", []], ["max_tokens", "int"], ')
        )
        assert json.loads(json.dumps(shape(json.loads(answer)))) == expected
    else:
        assert shape(json.loads(answer)) == expected


@pytest.mark.parametrize("name", ["prefill/error-404-model", "prefill/error-400", "prefill/error-404-path"])
def test_errors_are_the_recorded_bytes(sims: SimClient, name: str) -> None:
    known = INDEX[name]
    status, body = sims.exchange(sims.prefill[0], known["path"], known["request"])
    assert (status, body) == (known["status"], recorded(name))


def test_a_prompt_that_is_too_long_is_refused_in_the_recorded_words(sims: SimClient) -> None:
    status, body = sims.exchange(sims.prefill[0], "/v1/completions", {"prompt": [65] * 9000, "max_tokens": 1})
    assert (status, body) == (400, recorded("prefill/error-400-too-long"))


def test_metrics_name_the_block_size_and_the_usage_as_recorded(sims: SimClient) -> None:
    excerpt = recorded("prefill/metrics-excerpt").decode()
    shown = sims.get(sims.decode[0], "/metrics").decode()
    assert '# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.' in shown
    for text in (excerpt, shown):
        assert 'vllm:cache_config_info{_block_size_resolved="True",block_size="32",' in text


def test_text_that_may_become_a_stop_string_is_held_back_as_recorded() -> None:
    pieces = [_content(event) for event in _events("stock/chat-stream-plain")][1:]
    expected = [_content(event) for event in _events("stock/chat-stream-stop-string")][1:]
    stop_text = StopText(("Wg",))
    shown = []
    for piece in pieces:
        text, stop = stop_text.push(piece, is_last=False)
        shown.append(text)
        if stop:
            break
    assert shown == expected
    assert stop == "Wg"


def test_nothing_is_held_back_at_the_end_of_an_answer() -> None:
    stop_text = StopText(("xyz",))
    assert stop_text.push("abx", is_last=False) == ("a", None)
    assert stop_text.push("", is_last=True) == ("bx", None)


@pytest.mark.parametrize("extra", [{}, {"max_tokens": 5}, {"stop": ["e"]}, {"min_tokens": 9}])
def test_the_right_answer_is_known_without_asking(extra: dict[str, Any]) -> None:
    settings = WorkerSettings(role="decode", engine=EngineSettings(prefix_caching=False))
    with SimClient([], [settings]) as sims:
        for path, dialect, fields in (
            ("/v1/chat/completions", "chat", {"messages": [{"role": "user", "content": "Hello"}]}),
            ("/v1/completions", "completions", {"prompt": "Hello"}),
        ):
            asked = {**fields, **extra}
            assert sims.text(sims.post(sims.decode[0], path, asked)) == right_answer(dialect, asked, settings)


def _events(name: str) -> list[Any]:
    return [json.loads(event[6:]) for event in recorded(name).split(b"\n\n") if event.startswith(b"data: {")]


def _content(event: Any) -> str:
    return event["choices"][0]["delta"]["content"]
