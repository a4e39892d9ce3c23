"""What a choice of a chat gains, piece by piece; streams and whole answers are built from it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of what the model thought aloud before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the function `name` begins; calls count from 0 in each choice."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments, as the model wrote it."""

    index: int
    text: str


ChatEvent = ContentPiece | ReasoningPiece | CallStart | CallArguments


def joined_events(events: list[ChatEvent]) -> list[ChatEvent]:
    """The same with neighbouring pieces of one text joined, and without empty pieces."""
    joined: list[ChatEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallStart):
            joined.append(event)
        elif not event.text:
            continue
        elif isinstance(event, ContentPiece) and isinstance(last, ContentPiece):
            joined[-1] = ContentPiece(last.text + event.text)
        elif isinstance(event, ReasoningPiece) and isinstance(last, ReasoningPiece):
            joined[-1] = ReasoningPiece(last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and event.index == last.index
        ):
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined
