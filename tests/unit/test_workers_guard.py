from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.guard import SecretGuard, carries_transfer_params, kv_config

SECRET = "open sesame"

CARRYING = [
    '{"kv_transfer_params": {}}',
    '{"kv_transfer_params": null}',
    '{"ec_transfer_params": {}}',
    '{"model": "m", "kv_transfer_params" : {"do_remote_decode": true}}',
    '{"kv_transfer_params": null, "kv_transfer_params": {}}',
    '{"kv_transfer_params": {}, "model": "m", "kv_transfer_params": null}',
    '{"\\u006bv_transfer_params": {}}',
    '{"kv\\u005Ftransfer_par\\u0061ms": {}}',
    '{"vllm_xargs": {"kv_transfer_params": {}}}',
    '{"sampling_params": {"extra_args": {"kv_transfer_params": {}}}}',
    '{"requests": [{"a": [{"kv_transfer_params": {}}]}]}',
    '[{"kv_transfer_params": {}}]',
    # What cannot be understood is not let through on trust.
    '{"kv_transfer_params": {}',
    '{"kv_transfer_params": NaN, }',
    "[" * 100_000 + '"kv_transfer_params"',
    '--x\r\ncontent-disposition: form-data; name="vllm_xargs"\r\n\r\n{"kv_transfer_params": {}}\r\n--x--',
    '--x\r\ncontent-disposition: form-data; name="vllm_xargs"\r\n\r\n{"kv\\u005ftransfer_params": {}}\r\n--x--',
    "vllm_xargs=%7B%22kv_transfer_params%22%3A1%7D",
    "vllm_xargs=%7B%22%6Bv%5Ftransfer%5fparams%22%3A1%7D",
]
INNOCENT = [
    "",
    "{}",
    '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}',
    '{"messages": [{"role": "user", "content": "what is kv_transfer_params?"}]}',
    '{"prompt": "kv_transfer_params"}',
    '{"messages": [{"role": "user", "content": "\\"kv_transfer_params\\": {}"}]}',
    '{"tools": [{"function": {"parameters": {"properties": {"kv_transfer_params": {"type": "string"}}}}}]}',
    '{"response_format": {"json_schema": {"schema": {"properties": {"ec_transfer_params": {}}}}}}',
    '{"chat_template_kwargs": {"kv_transfer_params": 1}}',
    '{"kv_transfer_params_": 1, "KV_TRANSFER_PARAMS": 2, "my.kv_transfer_params": 3}',
    '{"prompt": "\\\\u006bv_transfer_params"}',
    "not json at all",
    "file=%00%ff",
]


@pytest.mark.parametrize("text", CARRYING)
def test_a_body_that_sets_transfer_parameters_is_told(text: str) -> None:
    assert carries_transfer_params(text.encode())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_every_encoding_the_server_decodes_is_searched(encoding: str) -> None:
    assert carries_transfer_params('{"kv_transfer_params": {}}'.encode(encoding))


@pytest.mark.parametrize("text", INNOCENT)
def test_a_body_that_sets_none_is_told(text: str) -> None:
    assert not carries_transfer_params(text.encode())


@given(st.binary())
def test_no_bytes_break_the_search(body: bytes) -> None:
    assert carries_transfer_params(body) in {True, False}


KEYS = st.sampled_from(["kv_transfer_params", "messages", "vllm_xargs", "prompt", "a", "tools"])
JSON = st.recursive(
    st.none() | st.sampled_from(["kv_transfer_params", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)


@given(st.dictionaries(KEYS, JSON, max_size=4), st.data())
def test_spelling_a_key_with_escapes_changes_nothing(body: dict[str, Any], data: st.DataObject) -> None:
    plain = json.dumps(body)
    position = data.draw(st.integers(0, len("kv_transfer_params") - 1))
    name = "kv_transfer_params"
    escaped = f"{name[:position]}\\u{ord(name[position]):04x}{name[position + 1 :]}"
    spelt = plain.replace(f'"{name}"', f'"{escaped}"')
    assert json.loads(spelt) == body
    assert carries_transfer_params(spelt.encode()) == carries_transfer_params(plain.encode())
    if "kv_transfer_params" in body:
        assert carries_transfer_params(plain.encode())


# --- the middleware --------------------------------------------------------------------------------------------------


class App:
    """Reads a request to its end, then (``waits``) for the client to leave, and remembers all it was told."""

    def __init__(self, *, waits: bool = False) -> None:
        self.seen: list[Any] = []
        self.waits = waits

    async def __call__(self, _: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            self.seen.append(message)
            if message["type"] == "http.disconnect":
                return
            if not message.get("more_body") and not self.waits:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})


def body_messages(*parts: bytes) -> list[dict[str, Any]]:
    return [
        {"type": "http.request", "body": part, "more_body": index + 1 < len(parts)} for index, part in enumerate(parts)
    ]


def play(guard: SecretGuard, messages: list[dict[str, Any]], *headers: tuple[bytes, bytes], **scope: Any) -> Any:
    """Run one request; returns (status, body) of the answer, ``None`` for none."""
    waiting, sent = list(messages), []

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    request = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": list(headers), **scope}
    asyncio.run(guard(request, receive, send))
    return (sent[0]["status"], sent[1]["body"]) if sent else None


CARRIES = b'{"kv_transfer_params": {}}'


def test_hazard_10_29_a_stranger_is_refused_with_an_openai_error() -> None:
    app = App()
    status, body = play(SecretGuard(app, SECRET), body_messages(CARRIES))
    assert (status, app.seen) == (403, [])
    assert json.loads(body) == {
        "error": {
            "message": "kv_transfer_params and ec_transfer_params may only come from the gateway.",
            "type": "PermissionDeniedError",
            "param": None,
            "code": "kvloop_secret",
        }
    }


@pytest.mark.parametrize("method", ["POST", "GET", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/", "/invocations"])
def test_hazard_10_29_every_method_and_path_is_guarded(method: str, path: str) -> None:
    assert play(SecretGuard(App(), SECRET), body_messages(CARRIES), method=method, path=path)[0] == 403


@pytest.mark.parametrize("cut", range(len(CARRIES) + 1))
def test_a_body_in_pieces_is_searched_as_one(cut: int) -> None:
    assert play(SecretGuard(App(), SECRET), body_messages(CARRIES[:cut], CARRIES[cut:]))[0] == 403


@pytest.mark.parametrize("value", [b"", b"open", b"open sesame ", b"Open sesame"])
def test_a_wrong_secret_opens_nothing(value: bytes) -> None:
    assert play(SecretGuard(App(), SECRET), body_messages(CARRIES), (b"x-kvloop-secret", value))[0] == 403


def test_two_secrets_open_nothing() -> None:
    headers = [(b"x-kvloop-secret", b"guess"), (b"x-kvloop-secret", SECRET.encode())]
    assert play(SecretGuard(App(), SECRET), body_messages(CARRIES), *headers)[0] == 403


def test_the_secret_opens_and_nothing_is_read_before_the_application_asks() -> None:
    app = App()
    messages = body_messages(CARRIES[:3], CARRIES[3:])
    guard = SecretGuard(app, SECRET, max_bytes=1)
    assert play(guard, messages, (b"x-kvloop-secret", SECRET.encode())) == (200, b"served")
    assert app.seen == messages


def test_without_a_secret_the_guard_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLOOP_WORKER_SECRET", raising=False)
    assert play(SecretGuard(App()), body_messages(CARRIES)) == (200, b"served")


def test_the_secret_and_the_limit_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_WORKER_SECRET", SECRET)
    monkeypatch.setenv("KVLOOP_GUARD_MAX_BYTES", "30")
    assert play(SecretGuard(App()), body_messages(CARRIES))[0] == 403
    assert play(SecretGuard(App()), body_messages(b"x" * 31))[0] == 413


def test_an_innocent_body_reaches_the_application_message_by_message() -> None:
    app = App()
    messages = body_messages(b'{"prompt":', b"", b' "hi"}')
    assert play(SecretGuard(app, SECRET), messages) == (200, b"served")
    assert app.seen == messages


def test_the_application_still_learns_that_its_client_left() -> None:
    app = App(waits=True)
    messages = [*body_messages(b"{}"), {"type": "http.disconnect"}]
    assert play(SecretGuard(app, SECRET), messages) is None
    assert app.seen == messages


def test_a_client_that_leaves_in_mid_body_is_passed_on_as_it_came() -> None:
    app = App()
    messages = [{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}]
    assert play(SecretGuard(app, SECRET), messages) is None
    assert app.seen == messages


def test_a_body_over_the_limit_is_refused_unread() -> None:
    app = App()
    status, body = play(SecretGuard(app, SECRET, max_bytes=10), body_messages(b"x" * 6, b"x" * 6, b"never read"))
    assert (status, app.seen) == (413, [])
    assert json.loads(body)["error"]["code"] == 413


def test_a_websocket_is_passed_on_untouched() -> None:
    app = App()
    messages = [{"type": "http.disconnect"}]
    play(SecretGuard(app, SECRET), messages, type="websocket")
    assert app.seen == messages


def ask_kv_config(*, secret: str, guarded_by: str = SECRET) -> list[dict[str, Any]]:
    """Ask a guarded vLLM how it transfers KV; returns what the guard sends, or marks that the application was asked."""
    sent: list[dict[str, Any]] = []
    config = SimpleNamespace(
        kv_load_failure_policy="recompute", kv_connector_extra_config={"a": 1}, engine_id="private"
    )
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=config)))
    headers = [(b"x-kvloop-secret", secret.encode())]
    scope = {"type": "http", "path": "/kvloop/kv-config", "headers": headers, "app": app}

    async def application(*_: Any) -> None:
        sent.append({"type": "application"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(SecretGuard(application, secret=guarded_by)(scope, receive, send))
    return sent


def test_whoever_knows_the_secret_is_told_how_kv_is_transferred() -> None:
    start, body = ask_kv_config(secret=SECRET)
    assert start["status"] == 200
    assert json.loads(body["body"]) == {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"a": 1}}


def test_nobody_else_is() -> None:
    start, body = ask_kv_config(secret="wrong")
    assert start["status"] == 403
    assert json.loads(body["body"])["error"]["code"] == "kvloop_secret"
    assert ask_kv_config(secret="", guarded_by="") == [{"type": "application"}]


def test_a_worker_without_a_connector_has_nothing_to_tell() -> None:
    assert kv_config({"app": SimpleNamespace(state=SimpleNamespace(vllm_config=None))}) == {}
    assert kv_config({}) == {}
