"""The roles prefill and decode in the real Envoy, between simulated workers and a P/D orchestrator played by the test."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_harness import HOST, Answer, Gateway, free_ports, worker
from otlp_collector import Collector

from extproc.headers import ROLE
from extproc.stream import PROCESS_PATH
from workers.intercepted import VLLM_ROUTER
from workers.sim.faults import Fault, Kind
from workers.sim.text import WORDS
from workers.supervision import Component, inherited_environment, wait_until_ready

DOCUMENT = "".join(WORDS[1000:1300])
NOTHING_REMOTE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
HANDLE_KEYS = {"remote_block_ids", "remote_host", "remote_engine_id", "kvloop_digest", "token_ids", "prompt_token_ids"}
_numbers = itertools.count(1)


@dataclass
class Orchestrator:
    """A P/D router as vllm-router is one: it forwards bodies and no headers but those it makes itself."""

    gateway: Gateway
    prefill_port: int
    decode_port: int
    carries_handles: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    carried: dict[str, Any] = field(default_factory=dict)
    conversation: str = ""

    def __post_init__(self) -> None:
        self.conversation = f"intercepted-{next(_numbers)}"

    def say(self, text: str, **fields: Any) -> tuple[Answer, Answer]:
        """Play a turn: what P's leg and D's leg were answered."""
        self.messages.append({"role": "user", "content": text})
        prefilled, decoded = self.turn(**fields)
        self.messages.append({"role": "assistant", "content": decoded.text})
        return prefilled, decoded

    def turn(self, **fields: Any) -> tuple[Answer, Answer]:
        body = {"model": "sim", "messages": self.messages, "stream": True, **fields}
        if not self.carries_handles:
            body["session_id"] = self.conversation
        prefilled = self.prefill({**body, "kv_transfer_params": NOTHING_REMOTE | self.carried})
        params = prefilled.json["kv_transfer_params"]
        decoded = self.send(self.decode_port, {**body, "kv_transfer_params": params})
        if self.carries_handles:
            self.carried = next(
                event["kv_transfer_params"] for event in decoded.events if event.get("kv_transfer_params")
            )
        return prefilled, decoded

    def prefill(self, body: dict[str, Any], port: int | None = None) -> Answer:
        return self.send(port or self.prefill_port, {**body, "stream": False, "max_tokens": 1})

    def send(self, port: int, body: dict[str, Any]) -> Answer:
        request_id = f"___prefill_addr_a___decode_addr_b_{next(_numbers)}"
        return self.gateway.post("/v1/chat/completions", body, headers={"x-request-id": request_id}, port=port)


@pytest.fixture
def intercepted(start_gateway: Any) -> Any:
    """Return a function that starts Envoy in the intercept topology, and an orchestrator in front of it."""

    def start(*, carries_handles: bool = False, env: dict[str, str] | None = None, **options: Any) -> Orchestrator:
        prefill_port, decode_port = free_ports(2)
        owner = {"KVLOOP_HANDLE_OWNER": "orchestrator" if carries_handles else "kvloop"}
        envoy = {
            "topology": "intercept",
            "intercept_prefill": (f"{HOST}:{prefill_port}",),
            "intercept_decode": (f"{HOST}:{decode_port}",),
            **options.pop("envoy", {}),
        }
        gateway = start_gateway(envoy=envoy, extproc_env={**owner, **(env or {})}, **options)
        return Orchestrator(gateway, prefill_port, decode_port, carries_handles)

    return start


def right(router: Orchestrator, decoded: Answer) -> bool:
    """Whether D answered the history so far as one with right KV does."""
    history = router.messages[:-1] if router.messages[-1]["role"] == "assistant" else router.messages
    return decoded.text == router.gateway.right_text(history)


@pytest.mark.parametrize("has_digest", [True, False], ids=["digest", "token_ids"])
def test_an_orchestrator_s_turns_read_what_the_turn_before_left(intercepted: Any, has_digest: bool) -> None:
    stock = {"KVLOOP_DECODE_BLOCK_SIZE_TOKENS": "16"}
    router = intercepted(decode=[worker("decode", digests_handles=has_digest)], env=stock)
    outcomes = []
    for text in (DOCUMENT, "And then?", "And after that?"):
        prefilled, decoded = router.say(text)
        assert (prefilled.status, decoded.status, right(router, decoded)) == (200, 200, True)
        # The orchestrator's client sees what was done for its turn, and nothing of how.
        assert decoded.receipt == prefilled.receipt
        assert decoded.told().isdisjoint(HANDLE_KEYS)
        assert decoded.is_done
        outcomes.append(prefilled.outcome)
    assert outcomes == ["cold", "reused", "reused"]
    assert prefilled.receipt["reused"] == prefilled.receipt["held"]
    # What D received was P's own answer, without our mark.
    (last,) = [each.json for each in router.gateway.received("decode", path="/v1/chat/completions")][-1:]
    assert "kvloop_prompt" not in last["kv_transfer_params"]
    assert last["kv_transfer_params"]["do_remote_prefill"] is True


def test_an_edited_history_reads_only_what_is_proven(intercepted: Any) -> None:
    router = intercepted()
    router.say(DOCUMENT)
    router.messages[1]["content"] = "Something else altogether."
    prefilled, decoded = router.say("And then?")
    assert (prefilled.outcome, prefilled.reason, right(router, decoded)) == ("partial", "history_differs", True)


def test_whole_answers_are_captured_as_well(intercepted: Any) -> None:
    router = intercepted()
    router.say(DOCUMENT, stream=False)
    prefilled, decoded = router.say("And then?", stream=False)
    assert (prefilled.outcome, right(router, decoded)) == ("reused", True)
    assert decoded.told().isdisjoint(HANDLE_KEYS)


def test_hazard_18_a_p_that_fails_over_a_handle_never_shows(intercepted: Any) -> None:
    router = intercepted()
    router.say(DOCUMENT)
    gateway = router.gateway
    fault = Fault(kind=Kind.STATUS, status=500, leg="prefill", with_handle=True)
    gateway.fleet.call(lambda: [each.faults.add(fault) for each in gateway.fleet.prefill])
    prefilled, decoded = router.say("And then?")
    assert (prefilled.status, prefilled.outcome, prefilled.reason) == (200, "cold", "prefill_failed")
    assert right(router, decoded)
    gateway.fleet.call(lambda: [each.clear_faults() for each in gateway.fleet.prefill])
    assert router.say("And after that?")[0].outcome == "reused"


def test_errors_of_p_are_the_orchestrators_to_see(intercepted: Any) -> None:
    router = intercepted()
    answer = router.prefill(
        {"model": "nobody", "messages": [], "session_id": "c", "kv_transfer_params": NOTHING_REMOTE}
    )
    assert answer.status in {400, 404}
    assert answer.json["error"]["message"]
    gateway = router.gateway
    gateway.crash_worker(gateway.fleet.prefill[0])
    body = {"model": "sim", "messages": [], "session_id": "c", "kv_transfer_params": NOTHING_REMOTE}
    assert router.prefill(body).status == 503
    gateway.start_worker(gateway.fleet.prefill[0])


@pytest.mark.parametrize("has_digest", [True, False], ids=["digest", "token_ids"])
def test_a_handle_the_orchestrator_carries_is_proven_on_its_way(intercepted: Any, has_digest: bool) -> None:
    decode = [worker("decode", digests_handles=has_digest)]
    router = intercepted(carries_handles=True, decode=decode, env={"KVLOOP_DECODE_BLOCK_SIZE_TOKENS": "16"})
    assert router.say(DOCUMENT)[0].outcome == "cold"
    assert {"remote_block_ids", "remote_host"} <= router.carried.keys()
    assert "kvloop_digest" not in router.carried
    prefilled, decoded = router.say("And then?")
    assert (prefilled.outcome, right(router, decoded)) == ("reused", True)
    # A history the orchestrator did not look at: vLLM would have read all of the handle.
    router.messages[0]["content"] = "X" + DOCUMENT[1:]
    prefilled, decoded = router.say("And after that?")
    assert (prefilled.outcome, right(router, decoded)) == ("cold", True)


def test_hazard_07_a_handle_sent_twice_is_attached_once(intercepted: Any) -> None:
    router = intercepted(carries_handles=True)
    router.say(DOCUMENT)
    router.messages.append({"role": "user", "content": "And then?"})
    carried = dict(router.carried)
    first, _ = router.turn()
    router.carried = carried
    second, decoded = router.turn()
    assert [first.outcome, second.outcome, second.reason] == ["reused", "cold", "nothing_kept"]
    assert right(router, decoded)


def test_legs_without_a_conversation_leave_nothing_behind(intercepted: Any) -> None:
    router = intercepted()
    router.messages.append({"role": "user", "content": DOCUMENT})
    body = {"model": "sim", "messages": router.messages}
    prefilled = router.prefill({**body, "kv_transfer_params": NOTHING_REMOTE})
    params = prefilled.json["kv_transfer_params"]
    assert params.keys().isdisjoint({"kvloop_prompt"})
    decoded = router.send(router.decode_port, {**body, "stream": True, "kv_transfer_params": params})
    assert right(router, decoded)
    assert decoded.told().isdisjoint(HANDLE_KEYS)
    router.gateway.until(lambda: router.gateway.report()["live_pins"] == 0, "D's blocks are released")


def test_a_listener_per_worker_sends_our_own_calls_where_the_orchestrator_chose(intercepted: Any) -> None:
    ports = free_ports(2)
    router = intercepted(
        prefill=[worker("prefill")] * 2, envoy={"intercept_prefill": tuple(f"{HOST}:{port}" for port in ports)}
    )
    router.prefill_port = ports[1]
    for text in (DOCUMENT, "And then?", "And after that?"):
        assert right(router, router.say(text)[1])
    first, second = router.gateway.fleet.prefill
    assert [each.leg for each in first.received if each.leg] == []
    assert [each.leg for each in second.received if each.leg] == ["prefill", "render", "prefill", "render", "prefill"]


def test_what_an_orchestrator_says_reaches_its_workers(intercepted: Any) -> None:
    router = intercepted()
    headers = {"x-request-id": "___prefill_addr_a", "x-data-parallel-rank": "0", "x-kvloop-secret": "guess"}
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "kv_transfer_params": None}
    assert router.gateway.post("/v1/chat/completions", body, headers=headers, port=router.decode_port).status == 200
    (got,) = router.gateway.received("decode", path="/v1/chat/completions")
    assert got.headers["x-request-id"] == "___prefill_addr_a"
    assert got.headers["x-data-parallel-rank"] == "0"
    assert got.headers.get("x-kvloop-secret") != "guess"
    for port in (router.prefill_port, router.decode_port):
        assert router.gateway.request("GET", "/health", port=port).status == 200
        assert router.gateway.post("/inference/v1/generate", {}, port=port).status == 404


def test_the_conversation_may_stand_in_the_request_id(intercepted: Any) -> None:
    patterns = '{"x-request-id": "^(?P<conversation>[a-z0-9]+)--"}'
    router = intercepted(env={"KVLOOP_CONVERSATION_PATTERNS": patterns})
    messages = [{"role": "user", "content": DOCUMENT}]
    body = {"model": "sim", "messages": messages, "kv_transfer_params": NOTHING_REMOTE}
    for number in range(2):
        headers = {"x-request-id": f"chat7--{number}"}
        asked = {**body, "max_tokens": 1}
        prefilled = router.gateway.post("/v1/chat/completions", asked, headers=headers, port=router.prefill_port)
        params = prefilled.json["kv_transfer_params"]
        asked = {**body, "kv_transfer_params": params}
        decoded = router.gateway.post("/v1/chat/completions", asked, headers=headers, port=router.decode_port)
        messages += [{"role": "assistant", "content": decoded.text}, {"role": "user", "content": "And then?"}]
    assert prefilled.outcome == "reused"


def test_a_role_that_does_not_exist_is_refused(gateway: Gateway) -> None:
    port = gateway._extproc_ports[0][0]
    with grpc.insecure_channel(f"{HOST}:{port}", (("grpc.enable_http_proxy", 0),)) as channel:
        call = channel.stream_stream(PROCESS_PATH.decode())
        with pytest.raises(grpc.RpcError) as refused:
            list(call(iter([b""]), metadata=((ROLE, "router"),), timeout=20))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_each_of_an_orchestrators_legs_has_a_span_of_its_own(intercepted: Any) -> None:
    with Collector() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.grpc_endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        router = intercepted(env=env)
        router.say(DOCUMENT)
        router.say("And then?")

        def legs_by_request() -> list[list[str]]:
            spans = list(collector.spans)
            requests = [span for span in spans if not span.parent]
            return sorted(sorted(leg.name for leg in spans if leg.parent == request.id) for request in requests)

        expected = [["decode"], ["decode"], ["prefill"], ["prefill", "render"]]
        router.gateway.until(lambda: legs_by_request() == expected, "every leg's span has arrived")
        outcomes = {span.attributes["kvloop.outcome"] for span in collector.spans if not span.parent}
        assert outcomes == {"cold", "reused", "watched"}


def test_vllm_router_as_it_comes_from_pypi_needs_to_know_nothing(intercepted: Any, tmp_path: Path) -> None:
    router = intercepted()
    port, spare = free_ports(2)
    VLLM_ROUTER.environment.make(print)
    argv = VLLM_ROUTER.argv(port, spare, f"http://{HOST}:{router.prefill_port}", f"http://{HOST}:{router.decode_port}")
    component = Component("vllm-router", argv, inherited_environment(), tmp_path / "vllm-router.log", grace_seconds=2.0)
    component.start()
    try:
        gateway = router.gateway
        wait_until_ready(
            {"vllm-router": (component, lambda: gateway._answers(port, "/health"))},
            timeout_seconds=60.0,
            progress=lambda _: None,
        )
        messages, outcomes = [], []
        for text in (DOCUMENT, "And then?", "And after that?"):
            messages.append({"role": "user", "content": text})
            body = {"model": "sim", "messages": messages, "stream": True, "session_id": "s1"}
            answer = gateway.post("/v1/chat/completions", body, port=port)
            assert (answer.status, answer.text) == (200, gateway.right_text(messages))
            assert answer.told().isdisjoint(HANDLE_KEYS)
            outcomes.append(answer.outcome)
            messages.append({"role": "assistant", "content": answer.text})
        assert outcomes == ["cold", "reused", "reused"]
    finally:
        component.stop()
