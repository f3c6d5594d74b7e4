from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from extproc.proof import fingerprint, from_json, prompt_end, prompt_end_from_json
from workers import plugin, plugin_digest, plugin_nixl, plugin_repair, plugin_stream

HANDLE = {"do_remote_prefill": False, "do_remote_decode": True, "remote_num_tokens": 70}
OTHER = {**HANDLE, "remote_num_tokens": 71}


# --- switches ---------------------------------------------------------------------------------------------------


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace every part by one that only notes that it was installed."""
    done: list[str] = []
    for name in (*plugin.PARTS, plugin.CALM_NIXL, "KVLOOP_WORKER_SECRET"):
        monkeypatch.delenv(name, raising=False)
    parts = {name: lambda name=name: done.append(name) or name for name in plugin.PARTS}
    monkeypatch.setattr(plugin, "PARTS", parts)
    monkeypatch.setattr(plugin_nixl, "install", lambda delay: done.append(f"calm {delay}") or "")
    return done


def test_by_default_every_part_but_the_calming_is_on(installs: list[str]) -> None:
    plugin.register()
    assert installs == ["KVLOOP_PLUGIN_STREAM_HANDLE", "KVLOOP_PLUGIN_DIGEST", "KVLOOP_PLUGIN_REPAIR"]


def test_each_part_has_its_switch(installs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in plugin.PARTS:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("KVLOOP_PLUGIN_CALM_NIXL", "500")
    plugin.register()
    assert installs == ["calm 500"]


def test_a_part_that_does_not_fit_is_one_log_line_and_stops_no_other(
    installs: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def misfit() -> str:
        raise ImportError("no such module in this vLLM")

    monkeypatch.setitem(plugin.PARTS, "KVLOOP_PLUGIN_STREAM_HANDLE", misfit)
    monkeypatch.setenv("KVLOOP_PLUGIN_CALM_NIXL", "soon")  # int() fails
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert [record.getMessage().split(":")[1].split()[0] for record in caplog.records] == [
        "KVLOOP_PLUGIN_STREAM_HANDLE",
        "KVLOOP_PLUGIN_CALM_NIXL",
    ]
    assert installs == ["KVLOOP_PLUGIN_DIGEST", "KVLOOP_PLUGIN_REPAIR"]


@pytest.mark.parametrize(("argv", "lines"), [(["vllm"], 1), (["vllm", "--middleware", "workers.guard.SecretGuard"], 0)])
@pytest.mark.usefixtures("installs")
def test_a_secret_without_a_guard_is_said(
    argv: list[str], lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVLOOP_WORKER_SECRET", "s")
    monkeypatch.setattr(plugin.sys, "argv", argv)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert len(caplog.records) == lines


# --- the handle in streams -----------------------------------------------------------------------------------------


def event(*choices: tuple[int, str | None], **fields: Any) -> str:
    body = {"id": "c", "choices": [{"index": index, "finish_reason": reason} for index, reason in choices], **fields}
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def test_the_handle_goes_last_into_the_finish_chunk() -> None:
    handles = {0: HANDLE}
    assert plugin_stream.add_handle(event((0, "stop")), handles) == (
        'data: {"id":"c","choices":[{"index":0,"finish_reason":"stop"}],"kv_transfer_params":'
        '{"do_remote_prefill":false,"do_remote_decode":true,"remote_num_tokens":70}}\n\n'
    )
    assert handles == {}


@pytest.mark.parametrize(
    "text",
    [
        event((0, None)),
        event((1, "stop")),
        event(),
        "data: [DONE]\n\n",
        ": ping\n\n",
        'data: {"error":{"message":"{"}}\n\n',
        'data: {"choices":[null]}\n\n',
        "data: {broken}\n\n",
        "",
    ],
)
def test_every_other_event_is_left_as_it_is(text: str) -> None:
    handles = {0: HANDLE}
    assert plugin_stream.add_handle(text, handles) == text
    assert handles == {0: HANDLE}


def result(*choices: tuple[int, str | None], handle: dict[str, Any] | None = None) -> Any:
    outputs = [SimpleNamespace(index=index, finish_reason=reason) for index, reason in choices]
    return SimpleNamespace(outputs=outputs, kv_transfer_params=handle)


class Serving:
    """Stands in for vLLM's serving classes: one event per result, then the usage chunk and the end marker."""

    def __init__(self) -> None:
        self.closed = False

    async def stream(self, request: Any, result_generator: AsyncIterator[Any], request_id: str) -> AsyncIterator[str]:
        try:
            async for item in result_generator:
                prompt, output = item if isinstance(item, tuple) else (0, item)
                for choice in output.outputs:
                    yield event((choice.index + prompt * (request.n or 1), choice.finish_reason))
            yield event(usage=request_id)
            yield "data: [DONE]\n\n"
        finally:
            self.closed = True


class Results:
    """An asynchronous generator of results that knows whether it was closed."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.closed = False

    async def __call__(self) -> AsyncIterator[Any]:
        try:
            for item in self.items:
                yield item
        finally:
            self.closed = True


def streamed(*items: Any, n: int | None = None) -> list[str]:
    async def collect() -> list[str]:
        method = plugin_stream.wrapped(Serving.stream)
        generator = method(Serving(), SimpleNamespace(n=n), Results(*items)(), request_id="r")
        return [text async for text in generator]

    return asyncio.run(collect())


def handles_in(events: list[str]) -> list[Any]:
    return [json.loads(text[6:]).get("kv_transfer_params") for text in events if text.startswith("data: {")]


def test_a_stream_carries_the_handle_once_before_the_usage_chunk() -> None:
    events = streamed(result((0, None)), result((0, "length"), handle=HANDLE))
    assert handles_in(events) == [None, HANDLE, None]
    assert events[-1] == "data: [DONE]\n\n"


def test_a_stream_without_a_handle_is_byte_for_byte_vllms_own() -> None:
    items = (result((0, None)), result((0, "stop")))
    assert streamed(*items) == [event((0, None)), event((0, "stop")), event(usage="r"), "data: [DONE]\n\n"]


def test_each_choice_gets_its_own_handle() -> None:
    events = streamed(result((1, "stop"), handle=OTHER), result((0, "stop"), handle=HANDLE), n=2)
    assert handles_in(events) == [OTHER, HANDLE, None]


def test_choices_of_several_prompts_are_told_apart() -> None:
    events = streamed((1, result((0, "stop"), handle=OTHER)), (0, result((0, "stop"), handle=HANDLE)))
    assert handles_in(events) == [OTHER, HANDLE, None]


def test_closing_the_stream_closes_vllms_generators() -> None:
    async def leave_early() -> tuple[bool, bool]:
        serving, results = Serving(), Results(result((0, None)), result((0, None)))
        generator = plugin_stream.wrapped(Serving.stream)(serving, SimpleNamespace(n=1), results(), "r")
        await anext(generator)
        await generator.aclose()
        return serving.closed, results.closed

    assert asyncio.run(leave_early()) == (True, True)


def test_a_generator_with_other_arguments_is_refused() -> None:
    async def unknown(self: Any, request: Any, outputs: Any) -> AsyncIterator[str]:
        yield f"{self}{request}{outputs}"

    with pytest.raises(TypeError, match="outputs"):
        plugin_stream.wrapped(unknown)


# --- the digest ------------------------------------------------------------------------------------------------------

IDS = list(range(100, 200))


def test_the_digest_covers_the_tokens_the_handle_covers() -> None:
    handle: dict[str, Any] = dict(HANDLE)
    plugin_digest.add_digest(handle, IDS, 16, 40)
    digest = handle.pop("kvloop_digest")
    assert digest.pop("block_size") == 16
    assert prompt_end_from_json(digest.pop("prompt")) == prompt_end(IDS[:40])
    assert from_json(digest) == fingerprint(IDS[:70])
    assert handle == HANDLE


def test_tokens_in_flight_are_not_vouched_for() -> None:
    handle = {**HANDLE, "remote_num_tokens": len(IDS) + 2}
    plugin_digest.add_digest(handle, IDS, None, 40)
    assert handle["kvloop_digest"]["tokens"] == len(IDS)
    assert "block_size" not in handle["kvloop_digest"]


@pytest.mark.parametrize(
    "handle",
    [
        {"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": 70},
        {"do_remote_decode": True, "remote_num_tokens": 0},
        {"do_remote_decode": True},
        {"some_other_connector": 1},
    ],
    ids=["prefill", "nothing-held", "no-count", "foreign"],
)
def test_a_handle_that_is_not_a_decode_workers_stays_as_it_is(handle: dict[str, Any]) -> None:
    before = dict(handle)
    plugin_digest.add_digest(handle, IDS, 16, 40)
    assert handle == before


def scheduler(groups: int = 1, dcp: int = 1, pcp: int = 1) -> Any:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    config = SimpleNamespace(kv_cache_groups=[group] * groups)
    return SimpleNamespace(kv_cache_config=config, dcp_world_size=dcp, pcp_world_size=pcp)


@pytest.mark.parametrize(
    ("shape", "expected"), [({}, 16), ({"groups": 2}, None), ({"dcp": 2}, None), ({"pcp": 2}, None)]
)
def test_the_block_size_is_named_only_where_it_is_one_number(shape: dict[str, int], expected: int | None) -> None:
    assert plugin_digest.block_size_tokens(scheduler(**shape)) == expected


def request(**fields: Any) -> Any:
    return SimpleNamespace(
        **{"prompt_embeds": None, "mm_features": [], "all_token_ids": IDS, "num_prompt_tokens": 40, **fields}
    )


def finish(asked: Any, handle: dict[str, Any] | None) -> tuple[bool, dict[str, Any] | None]:
    return plugin_digest.wrapped(lambda _scheduler, _request: (True, handle))(scheduler(), asked)


def test_a_finished_turn_gets_its_digest() -> None:
    keep, handle = finish(request(), dict(HANDLE))
    assert keep is True
    assert handle is not None
    assert handle["kvloop_digest"]["tokens"] == 70


def test_a_finish_without_a_handle_stays_without() -> None:
    assert finish(request(), None) == (True, None)


@pytest.mark.parametrize("content", [{"prompt_embeds": object()}, {"mm_features": ["image"]}])
def test_a_turn_its_tokens_do_not_identify_gets_no_digest(content: dict[str, Any]) -> None:
    assert finish(request(**content), dict(HANDLE)) == (True, HANDLE)


def test_a_request_of_another_vllm_keeps_its_handle(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert finish(SimpleNamespace(), dict(HANDLE)) == (True, HANDLE)
    assert "no digest for a handle" in caplog.text


# --- the repairs -------------------------------------------------------------------------------------------------------


def matched(params: dict[str, Any] | None, *, bidirectional: bool = True) -> tuple[int, bool]:
    original = plugin_repair.computing(lambda _scheduler, _request, computed: (100 - computed, True))
    connector = SimpleNamespace(is_bidirectional_kv_xfer_enabled=bidirectional)
    return original(connector, SimpleNamespace(kv_transfer_params=params), 40)


READ_BACK = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize(
    ("params", "bidirectional", "expected"),
    [
        (READ_BACK, True, (60, True)),
        ({**READ_BACK, "_remote_blocks_processed": True}, True, (0, False)),
        (READ_BACK, False, (0, False)),
        ({"do_remote_prefill": True}, False, (60, True)),
        (None, True, (60, True)),
    ],
    ids=["first", "tried-before", "never-started", "decode-leg", "plain"],
)
def test_a_prefill_worker_counts_on_a_read_only_when_one_will_start(
    params: dict[str, Any] | None,
    bidirectional: bool,
    expected: tuple[int, bool],
) -> None:
    assert matched(params, bidirectional=bidirectional) == expected


@pytest.mark.parametrize(
    ("params", "bidirectional", "tracked"),
    [
        ({"do_remote_decode": False, "do_remote_prefill": False}, True, {"r"}),
        ({"do_remote_decode": False, "do_remote_prefill": False}, False, set()),
        (None, True, set()),
        ({}, True, set()),
    ],
)
def test_every_turn_that_may_be_kept_is_tracked(
    params: dict[str, Any] | None, bidirectional: bool, tracked: set[str]
) -> None:
    called: list[Any] = []
    connector = SimpleNamespace(is_bidirectional_kv_xfer_enabled=bidirectional, _reqs_in_batch=set())
    asked = SimpleNamespace(kv_transfer_params=params, request_id="r")
    plugin_repair.tracking(lambda *call: called.append(call))(connector, asked, "blocks", 3)
    assert connector._reqs_in_batch == tracked
    assert called == [(connector, asked, "blocks", 3)]


# --- NIXL, and all of them twice ------------------------------------------------------------------------------------------


def test_the_delay_is_in_the_configuration_the_agent_is_made_from() -> None:
    config = SimpleNamespace(pthrDelay=0)
    made = plugin_nixl.calmed(lambda name, given: (name, given.pthrDelay), 1000)("agent", config)
    assert made == ("agent", 1000)


@pytest.mark.parametrize(
    ("wrap", "original"),
    [
        (plugin_stream.wrapped, Serving.stream),
        (plugin_digest.wrapped, lambda _scheduler, _request: (False, None)),
        (plugin_repair.computing, lambda _scheduler, _request, _computed: (0, False)),
        (plugin_repair.tracking, lambda *_: None),
    ],
)
def test_a_patch_applied_twice_is_applied_once(wrap: Any, original: Any) -> None:
    once = wrap(original)
    assert once is not original
    assert wrap(once) is once
