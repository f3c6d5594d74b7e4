"""One ext_proc stream: it performs what its ``Exchange`` asks for, and nothing else.

One ``ProcessStream`` per HTTP request. It ends in three ways: the exchange is done; Envoy closed or reset the stream (a
client left: our own call to P is dropped with it); or something was wrong, and then the stream is *aborted*: ending it
with OK while Envoy still waits for body pieces would hand a mutilated request to the worker.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import structlog

from extproc import headers as names
from extproc import wire
from extproc.errors import EnvoyProtocolError
from extproc.events import Call, Effect, ForwardRequest, Keep, LearnBlockSize, Receive, Release, Restore, Take, header
from extproc.exchange import Exchange
from extproc.grpc_server import Refused, Responder, Status
from extproc.http_exchange import HttpExchange, StreamEnded
from extproc.intercept_decode import DecodeExchange
from extproc.intercept_prefill import PrefillExchange
from extproc.sse import EventTooLarge
from extproc.store import StoredTurn
from extproc.tracing import TurnTrace
from extproc.turn import ResponseTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from extproc.events import Event, LegResult
    from extproc.gateway import Gateway
    from extproc.http2 import StreamEvents

PROCESS_PATH: Final = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"

ROLES: Final[dict[str, type[HttpExchange]]] = {
    "": Exchange,
    "gateway": Exchange,
    "prefill": PrefillExchange,
    "decode": DecodeExchange,
}
"""What an exchange does, by the role Envoy names in the stream's initial metadata."""

log = structlog.get_logger()


def serve_process(gateway: Gateway, responder: Responder) -> StreamEvents:
    """Serve a stream in the role it asks for, or end it if there is no such role."""
    role = responder.metadata(names.ROLE)
    if role in ROLES:
        return ProcessStream(gateway, responder)
    log.error("unknown_role", role=role, fix=f"{names.ROLE} in Envoy's configuration must be one of {list(ROLES)[1:]}")
    return Refused(responder, Status.INVALID_ARGUMENT, "no such role")


class ProcessStream:
    """One exchange, driven straight from the messages that arrive.

    Only our own calls to P, and a store outside this process, have to be waited for.
    """

    def __init__(self, gateway: Gateway, responder: Responder) -> None:
        self._gateway = gateway
        self._responder = responder
        role = ROLES[responder.metadata(names.ROLE)]
        self._exchange = role(gateway.settings, gateway.pool, responder.metadata(names.WORKER), load=gateway.load)
        self._run: Generator[Effect, Any, None] | None = self._exchange.run()
        self._waiting: deque[bytes] = deque()
        self._is_ended = False
        self._is_busy = False
        self._awaited: asyncio.Future[Any] | None = None
        self._trace: TurnTrace | None = None
        gateway.metrics.began()
        self._advance()

    def message_received(self, message: bytes) -> None:
        """Take Envoy's next message."""
        self._waiting.append(message)
        self._receive()

    def half_closed(self) -> None:
        """Take note that Envoy sends no more."""
        self._is_ended = True
        self._receive()

    def writable(self) -> None:
        """Go on after flow control held an answer back."""
        if self._is_busy and self._awaited is None:
            self._is_busy = False
            self._advance()

    def reset(self) -> None:
        """Drop everything: a client left, or Envoy is gone. Our own call to P is dropped with it."""
        # Not kept: a cancelled task holds the frames it was cancelled in, and they hold this stream and the request's body.
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            awaited.cancel()
        self._abandon()

    def _receive(self) -> None:
        """Give the exchange the message it is waiting for, if it is."""
        if not self._is_busy:
            self._advance(receives=True)

    def _next_event(self) -> Event | None:
        """Return the next message as an event, the stream's end after the last, None while there is neither."""
        now = time.monotonic()
        if not self._waiting:
            return wire.ended(now) if self._is_ended else None
        message = self._waiting.popleft()
        self._responder.consumed(message)
        return wire.read(message, now)

    def _advance(self, result: Any = None, *, receives: bool = False) -> None:
        """Let the exchange go on with ``result``, or with the message it waits for, until it has to wait again."""
        if self._run is None:
            return
        try:
            is_done = True
            if receives:
                is_done, result = self._perform(Receive())
            while is_done:
                is_done, result = self._perform(self._run.send(result))
        except StopIteration:
            self._end(Status.OK)
        except (EnvoyProtocolError, EventTooLarge, ResponseTooLarge) as error:
            self._abort(error)
        except Exception as error:  # noqa: BLE001 - logged
            self._fail(error)

    def _perform(self, effect: Effect) -> tuple[bool, Any]:
        """Return whether the effect is done, and its result; if not, whatever it waits for goes on from here."""
        match effect:
            case Receive():
                event = self._next_event()
                return event is not None, event
            case Call():
                return self._when_known(asyncio.get_running_loop().create_task(self._call(effect)))
            case Take(key):
                return self._when_known(self._gateway.take(key), self._claimed)
            case Keep() | Restore():
                return self._when_known(self._gateway.keep(effect), functools.partial(self._gateway.kept, effect))
            case Release():
                self._gateway.release(effect)
            case LearnBlockSize():
                self._gateway.learn_block_size(effect)
            case answer:
                if isinstance(answer, ForwardRequest) and (trace := self._traced()) is not None:
                    answer = trace.forward(answer)
                for message in wire.write(answer):
                    # In order, whatever flow control says: only the next effect waits for it.
                    self._is_busy = not self._responder.send(message)
                return not self._is_busy, None
        return True, None

    def _claimed(self, taken: Any) -> Any:
        """Return what was taken; if the client left in the very moment in which it came, have D let go of it."""
        if self._run is None and isinstance(taken, StoredTurn):
            self._gateway.release(Release(taken.handle, taken.model, "abandoned"))
        return taken

    async def _call(self, call: Call) -> LegResult:
        trace = self._traced()
        perform = self._gateway.call
        return await (perform(call) if trace is None else trace.call(call, perform))

    def _when_known(self, answer: Any, conclude: Callable[[Any], Any] = lambda known: known) -> tuple[bool, Any]:
        """Return ``conclude(answer)``, or go on with it from here if the answer is still to come."""
        if not isinstance(answer, asyncio.Future):
            return True, conclude(answer)

        def go_on(done: asyncio.Future[Any]) -> None:
            if done.cancelled():
                return
            self._awaited = None
            self._is_busy = False
            try:
                result = conclude(done.result())
            except Exception as error:  # noqa: BLE001 - told in full by _fail
                self._fail(error)
            else:
                self._advance(result)

        self._is_busy = True
        self._awaited = answer
        answer.add_done_callback(go_on)
        return False, None

    def _abort(self, error: Exception) -> None:
        request_id = header(self._exchange.headers, "x-request-id")
        log.warning("stream_aborted", request_id=request_id, error=type(error).__name__, detail=str(error))
        self._gateway.metrics.aborted(error)
        self._end(Status.INTERNAL, type(error).__name__)

    def _fail(self, error: Exception) -> None:
        """End a stream that met what should not happen."""
        log.error("stream_failed", request_id=header(self._exchange.headers, "x-request-id"), exc_info=error)
        self._gateway.metrics.aborted(error)
        self._abandon(type(error).__name__)
        self._responder.finish(Status.INTERNAL, type(error).__name__)

    def _abandon(self, error: str = "") -> None:
        """Let the exchange clean up after itself; all it may still ask for is a release."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            effect = run.throw(StreamEnded())
            while True:
                if isinstance(effect, Release):
                    self._gateway.release(effect)
                effect = run.send(None)
        except (StopIteration, StreamEnded):
            pass
        except Exception:
            # Others are being dropped with this one, when a connection is lost.
            log.exception("clean_up_failed")
        self._finished(error)

    def _end(self, status: int, text: str = "") -> None:
        self._run = None
        self._finished(text)
        self._responder.finish(status, text)

    def _traced(self) -> TurnTrace | None:
        """Return the turn's spans, begun when the first is needed; None if nobody wants them or it is no turn."""
        tracing = self._gateway.tracing
        if self._trace is None and tracing is not None and self._exchange.request is not None:
            self._trace = TurnTrace(tracing, self._exchange, self._responder.metadata)
        return self._trace

    def _finished(self, error: str) -> None:
        """Count the turn and tell of it. A fault in that must not cost this client its answer, nor others theirs."""
        traced_as = self._finish_trace(error)
        try:
            self._gateway.finished(self._exchange, trace_id=traced_as)
        except Exception:
            log.exception("receipt_lost")

    def _finish_trace(self, error: str) -> str | None:
        """End the turn's spans, if there are any, and return the trace's id."""
        try:
            trace = self._traced()
            if trace is None:
                return None
            trace.finish(error)
        except Exception:
            log.exception("trace_lost")
            return None
        return trace.trace_id
