"""What the service and its template workers say to each other over a pipe."""

import struct
from asyncio import StreamReader
from typing import BinaryIO, Final, TypeVar

import msgspec

MessageT = TypeVar("MessageT")
_LENGTH: Final = struct.Struct("<Q")


class Setup(msgspec.Struct, frozen=True):
    """The first message to a worker: the templates and the limits of a rendering."""

    templates: dict[str, str]
    special_tokens: dict[str, str]
    control_texts: list[str]
    max_output_characters: int
    max_memory_bytes: int
    max_seconds: float


class SetupDone(msgspec.Struct, frozen=True):
    """The answer to it; `error` is set when a template does not compile."""

    turn_ends: list[str] = []
    # A name of ToolCallFormat without its prefix; empty for an unknown one.
    tool_call_format: str = ""
    error: str = ""


class Render(msgspec.Struct, frozen=True):
    """A chat to render: the fields of protos.tokenizer.v1.ChatPrompt."""

    messages_json: bytes
    tools_json: bytes
    variables_json: bytes
    add_generation_prompt: bool
    continue_final_message: bool = False


class Rendered(msgspec.Struct, frozen=True):
    """The prompt, or why there is none: the fields of RenderedPrompt or of ChatRefused."""

    text: str = ""
    stand_ins: dict[str, str] = {}
    refusal: str = ""
    param: str = ""
    code: str = ""


def encode(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: StreamReader, kind: type[MessageT]) -> MessageT:
    """The next message; raises asyncio.IncompleteReadError when the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)


def receive_blocking(pipe: BinaryIO, kind: type[MessageT]) -> MessageT | None:
    """As `receive`, for a process that has nothing else to do; None at the end of the pipe."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = pipe.read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None
