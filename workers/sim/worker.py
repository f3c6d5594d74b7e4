"""The HTTP shell of one simulated worker: vLLM's routes, the faults, the report."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter, deque
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from extproc import headers as names
from workers.sim import text
from workers.sim.answer import Choice, choices_of, outputs
from workers.sim.api_request import ApiCall, ApiError, Dialect, check_model, parse_body, parse_call, render_messages
from workers.sim.api_response import DONE, AnswerWriter, Output
from workers.sim.engine import EngineDeadError, ReadFailedError
from workers.sim.faults import Faults, Kind, fault_from_json
from workers.sim.metrics import metrics_text
from workers.sim.peers import memory_to_json
from workers.sim.rank import Rank, total

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from workers.sim.engine import Engine
    from workers.sim.faults import Fault
    from workers.sim.peers import Registry
    from workers.sim.runner import EngineRunner
    from workers.sim.settings import WorkerSettings

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES: Final = 256 * 1024 * 1024
KEPT_REQUESTS: Final = 512
SSE: Final = {"content-type": "text/event-stream; charset=utf-8"}


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it arrived, ``at`` seconds of a monotonic clock. Header names are in lower case."""

    at: float
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return orjson.loads(self.body)

    @property
    def leg(self) -> str:
        """Which of the gateway's own calls this is; empty for none."""
        return self.headers.get(names.LEG, "")


class SimWorker:
    """One worker on one port. ``start``, ``stop``, ``crash`` and ``restart`` belong to its event loop."""

    def __init__(self, settings: WorkerSettings, registry: Registry, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.settings = settings
        self.registry = registry
        self.host = host
        self.port = port
        self.faults = Faults()
        self.received: deque[Received] = deque(maxlen=KEPT_REQUESTS)
        self.requests_by_path: Counter[str] = Counter()
        self.body_bytes_by_path: Counter[str] = Counter()
        self.tokenisations = 0
        self.unguarded_requests = 0
        self.tls: ssl.SSLContext | None = None
        """Serve TLS from the next start on; None for plaintext."""
        self.ranks = [Rank(number, settings, registry, self.faults) for number in range(settings.data_parallel_size)]
        self._app_runner: web.AppRunner | None = None
        self._unstalled = asyncio.Event()

    # --- life -------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of the first rank; mostly there is only one."""
        return self.ranks[0].engine

    @property
    def runner(self) -> EngineRunner:
        """What drives that engine."""
        return self.ranks[0].runner

    @property
    def address(self) -> str:
        """``host:port`` where it listens."""
        return f"{self.host}:{self.port}"

    @property
    def is_up(self) -> bool:
        """Whether it listens."""
        return self._app_runner is not None

    async def start(self) -> None:
        """Listen; on port 0, on a free one, which it then keeps over restarts."""
        # Other ranks are read at ports of their own, which serve the same.
        ports = [self.port, *(0 for _ in self.ranks[1:])]
        listeners = [socket.create_server((self.host, port), backlog=1024) for port in ports]
        self.port = listeners[0].getsockname()[1]
        for rank, listener in zip(self.ranks, listeners, strict=True):
            rank.start(self.settings, listener.getsockname()[1])
        # Like vLLM, stop computing for a client that is gone.
        self._app_runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None)
        await self._app_runner.setup()
        for listener in listeners:
            await web.SockSite(self._app_runner, listener, ssl_context=self.tls).start()

    async def stop(self) -> None:
        """Stop listening and drop all connections and KV."""
        app_runner, self._app_runner = self._app_runner, None
        if app_runner is None:
            return
        for site in list(app_runner.sites):
            await site.stop()
        for connection in app_runner.server.connections if app_runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()
        for rank in self.ranks:
            await rank.stop()
        await app_runner.cleanup()

    async def restart(self) -> None:
        """Come back on the same port with a new engine id: all KV is gone, handles point at nobody."""
        await self.stop()
        await self.start()

    # --- what peers and tests ask ------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return all that happened since the first start or the last ``reset``, and how things stand."""
        return {
            **total([rank.figures() for rank in self.ranks]),
            "role": self.settings.role,
            "engine_id": self.engine.engine_id,
            "engine_dead": any(rank.engine.dead for rank in self.ranks),
            "tokenisations": self.tokenisations,
            "unguarded_requests": self.unguarded_requests,
            "faults_struck": self.faults.struck,
            "requests_by_path": dict(self.requests_by_path),
            "body_bytes_by_path": dict(self.body_bytes_by_path),
        }

    def set_bidirectional(self, *, on: bool) -> None:
        """Switch ``bidirectional_kv_xfer``, as if started so. A prefill worker without it parks handles for ever."""
        self.settings = replace(self.settings, engine=replace(self.settings.engine, bidirectional=on))
        for rank in self.ranks:
            rank.engine.settings = replace(rank.engine.settings, bidirectional=on)

    def reset(self) -> None:
        """Forget what was counted and received, and take all faults back. KV stays."""
        self.clear_faults()
        self.faults.struck = self.tokenisations = self.unguarded_requests = 0
        for rank in self.ranks:
            rank.forget_counts()
        for kept in (self.received, self.requests_by_path, self.body_bytes_by_path):
            kept.clear()

    def skip(self, seconds: float) -> None:
        """Let the worker's clock jump ahead."""
        for rank in self.ranks:
            rank.runner.skip(seconds)

    def clear_faults(self) -> None:
        """Take all faults back, and let stalled requests go on."""
        self.faults.clear()
        self._unstalled.set()
        self._unstalled = asyncio.Event()

    # --- routes ------------------------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        served: dict[str, Handler] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/v1/chat/completions/render": self._render_chat,
            "/v1/completions/render": self._render_completions,
            "/tokenize": self._tokenize,
            "/sim/read": self._sim_read,
            "/sim/fault": self._sim_fault,
            "/sim/clock": self._sim_clock,
        }
        shown: dict[str, Handler] = {
            "/v1/models": self._models,
            "/health": self._health,
            "/ping": self._health,
            "/metrics": self._metrics,
            "/version": self._version,
            "/load": self._load,
            "/sim/report": self._sim_report,
        }
        for path, handler in served.items():
            app.router.add_post(path, self._guarded(handler))
        for path, handler in shown.items():
            app.router.add_get(path, self._guarded(handler))
        app.router.add_route("*", "/{path:.*}", self._guarded(_not_found))
        return app

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if request.path.startswith("/sim/"):
                return await handler(request)
            await self._note(request)
            try:
                failed = await self._strike(request)
                return failed if failed is not None else await handler(request)
            except ApiError as error:
                return _json(error.body, error.status)
            except EngineDeadError:
                return _json(_DEAD_BODY, 500)
            except ConnectionResetError:  # the client left, or a fault threw it out; nobody reads this
                return web.Response(status=499)

        return guarded

    async def _note(self, request: web.Request) -> None:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append(Received(time.monotonic(), request.method, request.path, headers, body))
        self.requests_by_path[request.path] += 1
        self.body_bytes_by_path[request.path] += len(body)
        if self.settings.secret is not None and b"_transfer_params" in body:
            self.unguarded_requests += headers.get(names.SECRET) != self.settings.secret

    async def _strike(self, request: web.Request) -> web.Response | None:
        """Apply the faults that come before any answer."""
        fault = self.faults.take(Kind.STATUS, Kind.RESET, Kind.STALL, **await self._conditions(request))
        if fault is None:
            return None
        if fault.kind is Kind.STATUS:
            error = {"message": "simulated fault", "type": "InternalServerError", "param": None, "code": fault.status}
            return _json(orjson.dumps({"error": error}), fault.status)
        if fault.kind is Kind.RESET:
            _abort_connection(request)
            raise ConnectionResetError
        if fault.seconds is None:
            await self._unstalled.wait()
        else:
            await asyncio.sleep(fault.seconds)
        return None

    async def _conditions(self, request: web.Request) -> dict[str, Any]:
        return {
            "path": request.path,
            "leg": request.headers.get(names.LEG, ""),
            "with_handle": b'"remote_block_ids"' in await request.read(),
        }

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "chat")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "completions")

    async def _answer(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        fields = await _fields(request)
        await asyncio.sleep(self.settings.timing.request_overhead_seconds)
        try:
            call = parse_call(dialect, fields, self.settings, request.headers.get("x-request-id"))
        except ApiError:
            self.runner.reject(fields.get("kv_transfer_params"))
            raise
        runner = self._rank_for(request).runner
        await self._tokenised(call)
        writer = AnswerWriter(call, self.settings, int(time.time()))
        if not call.stream:
            return _json(writer.whole([_sum(outputs) for outputs in await self._collect(call, runner)]))
        # vLLM answers 200 before the engine has started, whatever comes of it.
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        cut = self.faults.take(Kind.TRUNCATE, **await self._conditions(request))
        await self._stream(request, response, self._events(writer, runner), cut)
        return response

    def _rank_for(self, request: web.Request) -> Rank:
        """Return the rank the request names, else the least loaded; raises ``ApiError``."""
        named = request.headers.get(names.DATA_PARALLEL_RANK)
        if named is None:
            return min(self.ranks, key=lambda rank: rank.load)
        if not named.isdecimal() or int(named) >= len(self.ranks):
            message = f"data_parallel_rank {named} is out of range [0, {len(self.ranks)})."
            raise ApiError(400, "BadRequestError", message)
        return self.ranks[int(named)]

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        events: AsyncGenerator[bytes, None],
        cut: Fault | None,
    ) -> None:
        count = 0
        async with aclosing(events) as told:
            async for event in told:
                if cut is not None and count == cut.after_events:
                    await response.write(event[: len(event) // 2])
                    await asyncio.sleep(cut.seconds or 0)
                    _abort_connection(request)
                    return
                await response.write(event)
                count += 1
        await response.write_eof()

    async def _events(self, writer: AnswerWriter, runner: EngineRunner) -> AsyncGenerator[bytes, None]:
        call = writer.call
        completion_tokens = 0
        try:
            opened = call.dialect != "chat"
            async with aclosing(self._merged(call, runner)) as merged:
                async for output in merged:
                    if not opened:
                        opened = True
                        for chunk in writer.role_chunks():
                            yield chunk
                    completion_tokens += len(output.token_ids)
                    yield writer.chunk(output)
            if call.include_usage:
                yield writer.usage_chunk(completion_tokens)
        except EngineDeadError:
            yield b"data: " + _DEAD_BODY + b"\n\n"
        yield DONE

    async def _merged(self, call: ApiCall, runner: EngineRunner) -> AsyncGenerator[Output, None]:
        """Yield what all choices add, interleaved."""
        choices = choices_of(call, self.settings)
        if len(choices) == 1:
            async with aclosing(outputs(call, choices[0], runner, self.settings)) as only:
                async for output in only:
                    yield output
            return
        for step in _rounds(await self._collect(call, runner)):
            for output in step:
                yield output

    async def _collect(self, call: ApiCall, runner: EngineRunner) -> list[list[Output]]:
        """Run all choices to their end, side by side."""

        async def run(choice: Choice) -> list[Output]:
            async with aclosing(outputs(call, choice, runner, self.settings)) as steps:
                return [output async for output in steps]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(choice)) for choice in choices_of(call, self.settings)]
        return [task.result() for task in tasks]

    async def _render_chat(self, request: web.Request) -> web.Response:
        return _json(orjson.dumps(_generate_request(await self._rendered(request, "chat"), 0)))

    async def _render_completions(self, request: web.Request) -> web.Response:
        call = await self._rendered(request, "completions")
        return _json(orjson.dumps([_generate_request(call, index) for index in range(len(call.prompts))]))

    async def _rendered(self, request: web.Request, dialect: Dialect) -> ApiCall:
        if not self.settings.scale_out:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            raise ApiError(403, "PermissionDeniedError", message)
        call = parse_call(dialect, await _fields(request), self.settings, request.headers.get("x-request-id"))
        await self._tokenised(call)
        return call

    async def _tokenised(self, call: ApiCall) -> None:
        """Count tokenising, and let the time pass it takes."""
        if call.tokenised:
            self.tokenisations += len(call.prompts)
            seconds = self.settings.timing.tokenise_seconds(sum(map(len, call.prompts)))
            if seconds:
                await asyncio.sleep(seconds)

    async def _tokenize(self, request: web.Request) -> web.Response:
        fields = await _fields(request)
        check_model(fields, self.settings)
        is_chat = "messages" in fields
        ids = render_messages(fields, self.settings) if is_chat else text.encode(str(fields.get("prompt", "")))
        self.tokenisations += 1
        strings = [text.token_string(token) for token in ids] if fields.get("return_token_strs") else None
        limit = self.settings.engine.max_model_len
        return _json(orjson.dumps({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}))

    async def _models(self, _: web.Request) -> web.Response:
        now = int(time.time())
        permission = {
            "id": "modelperm-51a71a7e51a71a7e",
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self.settings.model_name,
            "object": "model",
            "created": now,
            "owned_by": "vllm",
            "root": self.settings.model_name,
            "parent": None,
            "max_model_len": self.settings.engine.max_model_len,
            "permission": [permission],
        }
        return _json(orjson.dumps({"object": "list", "data": [card]}))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if any(rank.engine.dead for rank in self.ranks) else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        for rank in self.ranks:
            rank.engine.expire(rank.runner.now())
        body = metrics_text(self.ranks, self.settings)
        return web.Response(text=body, content_type="text/plain", charset="utf-8")

    async def _version(self, _: web.Request) -> web.Response:
        return _json(orjson.dumps({"version": self.settings.vllm_version}))

    async def _load(self, _: web.Request) -> web.Response:
        return _json(orjson.dumps({"server_load": sum(rank.runner.running_count for rank in self.ranks)}))

    async def _sim_report(self, _: web.Request) -> web.Response:
        return _json(orjson.dumps(self.report()))

    async def _sim_read(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        rank = next((rank for rank in self.ranks if rank.engine.engine_id == asked["engine_id"]), None)
        if rank is None:
            return web.Response(status=409, text="another engine id: this worker restarted")
        try:
            memories = await rank.serve_read(asked["request_id"], asked["blocks"], asked["expiry_time"])
        except ReadFailedError as error:
            return web.Response(status=409, text=str(error))
        return _json(orjson.dumps({"blocks": [memory_to_json(memory) for memory in memories]}))

    async def _sim_fault(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        match asked.get("kind"):
            case "clear":
                self.clear_faults()
            case "park":
                self.set_bidirectional(on=not asked.get("on", True))
            case "no_render":
                self.settings = replace(self.settings, scale_out=not asked.get("on", True))
            case "restart" | "crash" as kind:
                pause_seconds = asked.get("seconds", 0.0) if kind == "crash" else 0.0
                self._later = asyncio.get_running_loop().create_task(self._go_down(pause_seconds))
            case _:
                try:
                    self.faults.add(fault_from_json(asked))
                except (TypeError, ValueError) as error:
                    return web.Response(status=400, text=str(error))
        return web.Response(status=204)

    async def _go_down(self, pause_seconds: float) -> None:
        await asyncio.sleep(0.01)  # so that whoever asked gets an answer
        await self.stop()
        await asyncio.sleep(pause_seconds)
        await self.start()

    async def _sim_clock(self, request: web.Request) -> web.Response:
        self.skip(float(orjson.loads(await request.read())["skip_seconds"]))
        return web.Response(status=204)


_DEAD_BODY: Final = orjson.dumps(
    {
        "error": {
            "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }
)


async def _not_found(_: web.Request) -> web.StreamResponse:
    return _json(b'{"detail":"Not Found"}', 404)


async def _fields(request: web.Request) -> dict[str, Any]:
    return parse_body(await request.read())


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _abort_connection(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _sum(steps: list[Output]) -> Output:
    last = steps[-1]
    return replace(
        last,
        text="".join(step.text for step in steps),
        token_ids=[token for step in steps for token in step.token_ids],
        confidences=[confidence for step in steps for confidence in step.confidences],
    )


def _rounds(choices: list[list[Output]]) -> list[list[Output]]:
    """Return the choices' steps side by side.

    Only the step that ends the last choice tells a handle, its last one, on every chunk: vLLM loses the others, and their
    blocks stay where they are until they expire.
    """
    rounds = [[steps[i] for steps in choices if i < len(steps)] for i in range(max(map(len, choices)))]
    for steps in rounds[:-1]:
        for output in steps:
            output.handle = None
    for output in rounds[-1]:
        output.handle = rounds[-1][-1].handle
    return rounds


def _generate_request(call: ApiCall, index: int) -> dict[str, Any]:
    """Return what the render endpoints answer: vLLM's ``GenerateRequest``."""
    sampling = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop": list(call.stop),
        "stop_token_ids": sorted(call.stop_token_ids),
        "max_tokens": call.max_tokens,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    }
    return {
        "request_id": call.call_id if len(call.prompts) == 1 else f"{call.call_id}-{index}",
        "token_ids": call.prompts[index],
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": sampling,
        "model": call.model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": call.stream,
        "stream_options": None,
        "cache_salt": call.cache_salt or None,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
