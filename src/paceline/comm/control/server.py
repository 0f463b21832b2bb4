"""The control server of a run: a thread of the launcher that answers the requests of workers."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections import OrderedDict, deque
from dataclasses import dataclass

from paceline.comm.control.access import ControlAccess
from paceline.comm.control.connection import keep_alive
from paceline.comm.control.errors import ControlError
from paceline.comm.control.frames import FrameWriter, Message
from paceline.comm.control.handshake import greet, welcome
from paceline.comm.control.key_values import KeyValues, Waiting
from paceline.comm.threads import start_thread
from paceline.errors import SettingsError

_NUM_REFUSALS = 100
_BACKLOG = 1024


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a control server bears from strangers.

    Args:
        handshake_s: Longest time from a connection to its first request.
        message_s: Longest time from the first byte of a message to its last.
        num_strangers: Number of connections that may be in their handshake; a further one ends the oldest of them.
    """

    handshake_s: float = 5.0
    message_s: float = 30.0
    num_strangers: int = 256


@dataclass(frozen=True)
class Refusal:
    """A connection that the server ended."""

    peer: str
    reason: str


class ControlServer:
    """Keys and values for the workers of a run, for those alone that know its token.

    One thread serves all. A connection whose bytes are not the next authentic message is ended; its client makes a new
    one. The server listens on one interface.

    Args:
        host: Address of the interface; by default this machine alone can reach it.
        port: Port; 0 takes a free one.
        token: Secret of the run; by default a new one.
        key_values: Keys and values at the beginning; by default none.
        ssl_context: TLS of the server's side; without it whoever can read the network can read messages, though not
            change them.
        limits: Limits on strangers.

    Attributes:
        access: Address and token for clients.
        refusals: The last connections that the server ended, and why.
        num_refused: Number of all of them.

    Raises:
        SettingsError: The address is not one to listen on.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: bytes | None = None,
        key_values: KeyValues | None = None,
        ssl_context: ssl.SSLContext | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise SettingsError(
                f"a control server must listen on one interface, but got host={host!r}; give the address by which the "
                "workers reach this machine"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise SettingsError(
                f"a control server must have a free port on an interface of this machine, but {host}:{port} is not: "
                f"{error}; choose another"
            ) from error
        self.access = ControlAccess(host, listener.getsockname()[1], token or os.urandom(32))
        self.refusals: deque[Refusal] = deque(maxlen=_NUM_REFUSALS)
        self.num_refused = 0
        self._limits = limits or ServerLimits()
        self._key_values = KeyValues() if key_values is None else key_values
        self._sessions: OrderedDict[_Session, None] = OrderedDict()
        self._strangers: OrderedDict[_Session, None] = OrderedDict()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = start_thread(self._run, listener, ssl_context, name="paceline-control", stop=self._end)

    def close(self) -> None:
        """End all connections and the thread; it may be called again."""
        self._end()
        self._thread.join()

    def __enter__(self) -> "ControlServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop.set)

    def _run(self, listener: socket.socket, ssl_context: ssl.SSLContext | None) -> None:
        with contextlib.closing(self._loop) as loop:
            loop.run_until_complete(self._serve(listener, ssl_context))

    async def _serve(self, listener: socket.socket, ssl_context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        handshake_s = None if ssl_context is None else self._limits.handshake_s
        server = await loop.create_server(
            lambda: _Session(self._key_values, self.access.token, self._limits, self),
            sock=listener,
            backlog=_BACKLOG,
            ssl=ssl_context,
            ssl_handshake_timeout=handshake_s,
        )
        await self._stop.wait()
        loop.remove_reader(listener)
        await asyncio.sleep(
            0
        )  # those that were accepted just now begin; after server.close() their sockets stayed open
        accepting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, return_exceptions=True)
        for session in list(self._sessions):
            session.end()
        server.close()
        await asyncio.sleep(0)  # let the connections be closed

    def note_begin(self, session: "_Session") -> None:
        """Record a new connection; nobody knows yet who it is."""
        self._sessions[session] = None
        self._strangers[session] = None
        if len(self._strangers) > self._limits.num_strangers:
            next(iter(self._strangers)).refuse(
                f"at most {self._limits.num_strangers} connections may be in their handshake, and this was the oldest"
            )

    def note_known(self, session: "_Session") -> None:
        """Record that a connection's client knows the token."""
        self._strangers.pop(session, None)

    def note_end(self, session: "_Session") -> None:
        """Record the end of a connection."""
        self._sessions.pop(session, None)
        self._strangers.pop(session, None)

    def note_refusal(self, peer: str, reason: str) -> None:
        """Record that the server ended a connection."""
        self.num_refused += 1
        self.refusals.append(Refusal(peer, reason))


class _Session(asyncio.Protocol):
    """One connection, in the server's thread."""

    def __init__(self, key_values: KeyValues, token: bytes, limits: ServerLimits, server: ControlServer) -> None:
        self._key_values = key_values
        self._token = token
        self._limits = limits
        self._server = server
        self._reader = greet(token)
        self._writer: FrameWriter | None = None
        self._is_known = False
        self._waiting: Waiting | None = None
        self._time_out: asyncio.TimerHandle | None = None
        """End of the wait."""
        self._deadline: asyncio.TimerHandle | None = None
        """End of the time for the handshake, or for the message that has begun."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the handshake its time."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        self._set_deadline(self._limits.handshake_s, "the handshake")
        self._server.note_begin(self)

    def data_received(self, data: bytes) -> None:
        """Answer what is complete."""
        if self._transport.is_closing():
            return
        self._reader.feed(data)
        try:
            num_read = 0
            while (message := self._reader.read()) is not None:
                self._take(message)
                num_read += 1
        except ControlError as error:
            self.refuse(str(error))
            return
        if self._is_known and (num_read or self._deadline is None):
            self._set_deadline(self._limits.message_s if self._reader.is_inside else None, "a message")

    def pause_writing(self) -> None:
        """Read no more of a client that does not read its replies."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection."""
        self._set_deadline(None)
        if self._waiting is not None:
            self._key_values.forget(self._end_wait())
        self._server.note_end(self)

    def refuse(self, reason: str) -> None:
        """End the connection, for a reason."""
        self._server.note_refusal(str(self._transport.get_extra_info("peername")), reason)
        self.end()

    def end(self) -> None:
        """End the connection."""
        self._server.note_known(self)
        self._transport.abort()

    def _take(self, message: Message) -> None:
        if self._writer is None:
            is_over = self._reader.is_inside
            answer, self._reader, self._writer = welcome(self._token, message)
            if is_over:
                raise ControlError("a client must wait for the server's answer to its handshake, but sent more")
            self._transport.write(answer)
            return
        if not self._is_known:
            self._is_known = True
            self._server.note_known(self)
            self._set_deadline(None)
        if self._waiting is not None:
            raise ControlError("a client must wait for the reply to its request, but sent another")
        reply = self._key_values.handle(message)
        if isinstance(reply, Waiting):
            reply.finish = self._finish
            self._waiting = reply
            self._time_out = asyncio.get_running_loop().call_later(reply.request.timeout_s, self._give_up)
        else:
            self._reply(reply)

    def _finish(self, reply: Message) -> None:
        self._end_wait()
        self._reply(reply)

    def _give_up(self) -> None:
        waiting = self._end_wait()
        self._key_values.forget(waiting)
        self._reply({"missing": sorted(waiting.missing)})

    def _end_wait(self) -> Waiting:
        assert self._waiting is not None
        assert self._time_out is not None
        self._time_out.cancel()
        waiting, self._waiting = self._waiting, None
        return waiting

    def _reply(self, message: Message) -> None:
        assert self._writer is not None
        try:
            frame = self._writer.write(message)
        except SettingsError as error:
            frame = self._writer.write({"error": str(error)})
        self._transport.write(frame)

    def _set_deadline(self, time_s: float | None, what: str = "") -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if time_s is not None:
            reason = f"{what} must be complete within {time_s:g} s, but is not"
            self._deadline = asyncio.get_running_loop().call_later(time_s, self.refuse, reason)
