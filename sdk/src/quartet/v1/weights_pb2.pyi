from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_ENCODING_UNSPECIFIED: _ClassVar[TensorEncoding]
    TENSOR_ENCODING_DENSE: _ClassVar[TensorEncoding]
    TENSOR_ENCODING_XOR_ZSTD: _ClassVar[TensorEncoding]
    TENSOR_ENCODING_SPARSE: _ClassVar[TensorEncoding]
    TENSOR_ENCODING_UNCHANGED: _ClassVar[TensorEncoding]
TENSOR_ENCODING_UNSPECIFIED: TensorEncoding
TENSOR_ENCODING_DENSE: TensorEncoding
TENSOR_ENCODING_XOR_ZSTD: TensorEncoding
TENSOR_ENCODING_SPARSE: TensorEncoding
TENSOR_ENCODING_UNCHANGED: TensorEncoding

class TensorInfo(_message.Message):
    __slots__ = ("name", "dtype", "shape", "digest", "encoding")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    digest: int
    encoding: TensorEncoding
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., digest: _Optional[int] = ..., encoding: _Optional[_Union[TensorEncoding, str]] = ...) -> None: ...

class WeightManifest(_message.Message):
    __slots__ = ("run_id", "version", "base_version", "tensors", "digest", "layout_signature", "payload_bytes", "base_digest", "adapter_config", "canary", "checksum")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CONFIG_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    base_version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorInfo]
    digest: bytes
    layout_signature: str
    payload_bytes: int
    base_digest: bytes
    adapter_config: str
    canary: Canary
    checksum: int
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ..., base_version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorInfo, _Mapping]]] = ..., digest: _Optional[bytes] = ..., layout_signature: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., base_digest: _Optional[bytes] = ..., adapter_config: _Optional[str] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class WeightChunk(_message.Message):
    __slots__ = ("offset", "data", "checksum")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    checksum: int
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class WeightEnd(_message.Message):
    __slots__ = ("payload_bytes", "payload_digest")
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    payload_bytes: int
    payload_digest: bytes
    def __init__(self, payload_bytes: _Optional[int] = ..., payload_digest: _Optional[bytes] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run_id", "held_version", "relay_address")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    held_version: int
    relay_address: str
    def __init__(self, run_id: _Optional[str] = ..., held_version: _Optional[int] = ..., relay_address: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("announced", "heartbeat")
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    announced: VersionAnnounced
    heartbeat: WatchHeartbeat
    def __init__(self, announced: _Optional[_Union[VersionAnnounced, _Mapping]] = ..., heartbeat: _Optional[_Union[WatchHeartbeat, _Mapping]] = ...) -> None: ...

class VersionAnnounced(_message.Message):
    __slots__ = ("run_id", "version", "digest", "sources")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    digest: bytes
    sources: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ..., digest: _Optional[bytes] = ..., sources: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchHeartbeat(_message.Message):
    __slots__ = ("latest_version",)
    LATEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    latest_version: int
    def __init__(self, latest_version: _Optional[int] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("run_id", "version", "base_version", "base_digest", "shared_memory")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    base_version: int
    base_digest: bytes
    shared_memory: bool
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ..., base_version: _Optional[int] = ..., base_digest: _Optional[bytes] = ..., shared_memory: _Optional[bool] = ...) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("manifest", "shared")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightManifest
    shared: SharedPayload
    def __init__(self, manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., shared: _Optional[_Union[SharedPayload, _Mapping]] = ...) -> None: ...

class SharedPayload(_message.Message):
    __slots__ = ("path", "token")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    path: str
    token: bytes
    def __init__(self, path: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run_id", "version", "base_version", "offset", "base_digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    base_version: int
    offset: int
    base_digest: bytes
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ..., base_version: _Optional[int] = ..., offset: _Optional[int] = ..., base_digest: _Optional[bytes] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("chunk", "end")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    chunk: WeightChunk
    end: WeightEnd
    def __init__(self, chunk: _Optional[_Union[WeightChunk, _Mapping]] = ..., end: _Optional[_Union[WeightEnd, _Mapping]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("manifest", "chunk", "commit")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightManifest
    chunk: WeightChunk
    commit: WeightEnd
    def __init__(self, manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., chunk: _Optional[_Union[WeightChunk, _Mapping]] = ..., commit: _Optional[_Union[WeightEnd, _Mapping]] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...
