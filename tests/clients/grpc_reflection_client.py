"""A client that knows no proto file: services and messages come from reflection, as those of grpcurl do."""

from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from features import GRPC, KEY, MODEL, WRONG_KEY, raises, report

SERVICE = "inference.GRPCInferenceService"
channel = grpc.insecure_channel(GRPC)
database = ProtoReflectionDescriptorDatabase(channel)
pool = DescriptorPool(database)


def call(name: str, key: str = KEY) -> list[Any]:
    """The responses to one request."""
    method = pool.FindServiceByName(SERVICE).methods_by_name[name]
    request = GetMessageClass(method.input_type)(model_name=MODEL)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    response = GetMessageClass(method.output_type)
    invoke = channel.stream_stream(
        f"/{SERVICE}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=response.FromString,
    )
    return list(invoke(iter([request]), metadata=[("authorization", f"Bearer {key}")], timeout=20))


def text() -> None:
    assert SERVICE in database.get_services()
    (response,) = call("ModelInfer")
    assert b"olleh" in response.SerializeToString()


def stream() -> None:
    parts = [part.infer_response for part in call("ModelStreamInfer")]
    texts = [
        bytes(part.outputs[0].contents.bytes_contents[0]) for part in parts if part.outputs[0].contents.bytes_contents
    ]
    assert b"".join(texts) == b"olleh", parts


def wrong_key() -> None:
    error: Any = raises(grpc.RpcError, lambda: call("ModelInfer", WRONG_KEY))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED


report({"text": text, "stream": stream, "wrong key": wrong_key})
channel.close()
