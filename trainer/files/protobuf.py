"""Makes protobuf's classes of messages from a table of their fields, without generated code. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from trainer.errors import ConfigError

BYTES, FLOAT, INT32, INT64, BOOL, STRING = 12, 2, 5, 3, 8, 9  # types of descriptor.proto
Field = tuple[str, int, int | str, bool]  # name, number, type or the name of a message, and True if it is repeated


def message_type(messages: Mapping[str, Sequence[Field]], name: str, missing: str) -> type[object]:
    """Returns protobuf's class of the message `name`, in a pool of its own, beside those of other libraries.

    Raises ConfigError with the sentence `missing` if protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ConfigError(missing) from error
    file = descriptor_pb2.FileDescriptorProto(name="hpo/messages.proto", package="hpo")
    for message_name, fields in messages.items():
        message = file.message_type.add(name=message_name)
        for field, number, kind, repeated in fields:
            added = message.field.add(name=field, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                added.type, added.type_name = added.TYPE_MESSAGE, f".hpo.{kind}"
            else:
                added.type = cast("descriptor_pb2.FieldDescriptorProto.Type.ValueType", kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"hpo.{name}"))
