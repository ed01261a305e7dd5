"""What a message says that this release's contract does not have: a peer of a newer one said it.

1. `unknown_field` finds a field, an alternative of a oneof or a kind of frame that is unknown, at whatever
   depth, and names the message it stands in. (An unknown enum value is a number in a known field: whoever
   reads a request refuses it; in an answer it is told by its number.)
2. A request that has one is NOT_IMPLEMENTED: a setting that an older service passes over would sample or
   train something else.
3. One that has none is passed without a look at its fields: its size says so, whoever encoded it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from quartet.errors import QuartetError


def unknown_field(message: Message, raw: bytes) -> str | None:
    """The first unknown field of a message that was parsed from `raw`, as "LossSpec, field 16"; None without.

    Unknown fields are gone from the message afterwards.
    """
    message.DiscardUnknownFields()
    known_bytes = message.ByteSize()
    if known_bytes == len(raw):
        return None
    whole = type(message).FromString(raw)
    # Other encoders may write the same in more bytes.
    return None if whole.ByteSize() == known_bytes else next(_named(whole), None)


def refuse_unknown(request: Message, raw: bytes, rpc: str) -> None:
    """Refuses a request that says what this release does not know. Raises NOT_IMPLEMENTED."""
    unknown = unknown_field(request, raw)
    if unknown is None:
        return
    remedy = "upgrade this service to the caller's release, or leave that setting out"
    raise QuartetError(
        "NOT_IMPLEMENTED",
        f"{rpc} was asked with {unknown}, which this release does not know; {remedy}",
        rpc=rpc,
        field=unknown,
        remedy=remedy,
    )


def enum_name(enum: EnumTypeWrapper, value: int) -> str:
    """ "TIMEOUT" for FAILURE_KIND_TIMEOUT; "9" for a value that this release does not know."""
    names = enum.DESCRIPTOR.values_by_number
    prefix = names[0].name.removesuffix("UNSPECIFIED")
    return names[value].name.removeprefix(prefix) if value in names else str(value)


def newer_field(message: Message) -> str | None:
    """The first unknown one of the message's own fields, not of the messages in it, that no older release
    wrote: what was taken out of the contract is reserved there."""
    reserved = _reserved(message.DESCRIPTOR)
    newer = next((number for number in _unknown_numbers(message) if number not in reserved), None)
    return None if newer is None else _name(message, newer)


@cache
def _reserved(descriptor: Descriptor) -> frozenset[int]:
    declared = descriptor_pb2.DescriptorProto()
    descriptor.CopyToProto(declared)
    return frozenset(number for one in declared.reserved_range for number in range(one.start, one.end))


def _unknown_numbers(message: Message) -> list[int]:
    unknown = UnknownFieldSet(message)
    return [unknown[at].field_number for at in range(len(unknown))]


def _name(message: Message, number: int) -> str:
    return f"{message.DESCRIPTOR.name}, field {number}"


def _named(message: Any) -> Iterator[str]:
    for number in _unknown_numbers(message):
        yield _name(message, number)
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            values = [one for one in value.values() if isinstance(one, Message)]
        else:
            values = [value] if isinstance(value, Message) else value
        for one in values:
            yield from _named(one)
