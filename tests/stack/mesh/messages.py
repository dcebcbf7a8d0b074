"""Envoy's messages from and to the JSON of manifests. A field that Envoy does not know is refused, as control planes do."""

from __future__ import annotations

from typing import Any

# Whatever an Any in a manifest may hold has to be imported to be known.
import envoy.config.bootstrap.v3.bootstrap_pb2
import envoy.extensions.access_loggers.file.v3.file_pb2
import envoy.extensions.access_loggers.filters.cel.v3.cel_pb2
import envoy.extensions.filters.http.cors.v3.cors_pb2
import envoy.extensions.filters.http.ext_proc.v3.ext_proc_pb2
import envoy.extensions.filters.http.fault.v3.fault_pb2
import envoy.extensions.filters.http.grpc_stats.v3.config_pb2
import envoy.extensions.filters.http.rbac.v3.rbac_pb2
import envoy.extensions.filters.http.router.v3.router_pb2
import envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2
import envoy.extensions.http.early_header_mutation.header_mutation.v3.header_mutation_pb2
import envoy.extensions.load_balancing_policies.least_request.v3.least_request_pb2
import envoy.extensions.load_balancing_policies.override_host.v3.override_host_pb2
import envoy.extensions.load_balancing_policies.round_robin.v3.round_robin_pb2
import envoy.extensions.load_balancing_policies.subset.v3.subset_pb2
import envoy.extensions.transport_sockets.tls.v3.tls_pb2
import envoy.extensions.upstreams.http.v3.http_protocol_options_pb2  # noqa: F401
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message

TYPES = "type.googleapis.com/"

_OVERRIDE_HOST = "envoy/extensions/load_balancing_policies/override_host/v3/override_host.proto"


_FILTER_CHAIN = "envoy.extensions.filters.http.filter_chain.v3"


def _filter_chain() -> FileDescriptorProto:
    """The filter of filters, of which the installed messages know nothing."""
    file = FileDescriptorProto(name="filter_chain.proto", package=_FILTER_CHAIN, syntax="proto3")
    file.dependency.append("envoy/config/core/v3/extension.proto")
    for kind, name, label, held in (
        ("FilterChain", "filters", FieldDescriptor.LABEL_REPEATED, "envoy.config.core.v3.TypedExtensionConfig"),
        ("FilterChainConfig", "default_filter_chain", FieldDescriptor.LABEL_OPTIONAL, f"{_FILTER_CHAIN}.FilterChain"),
        ("FilterChainConfigPerRoute", "filter_chain", FieldDescriptor.LABEL_OPTIONAL, f"{_FILTER_CHAIN}.FilterChain"),
    ):
        field = file.message_type.add(name=kind).field.add(name=name, number=1, label=label)
        field.type, field.type_name = FieldDescriptor.TYPE_MESSAGE, f".{held}"
    return file


def _with_newer_fields() -> descriptor_pool.DescriptorPool:
    """All files of the installed messages, and what Envoy 1.40 has beside them."""
    pool, default, added = descriptor_pool.DescriptorPool(), descriptor_pool.Default(), set[str]()

    def add(file: FileDescriptor) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for needed in file.dependencies:
            add(needed)
        proto = FileDescriptorProto()
        file.CopyToProto(proto)
        if file.name == _OVERRIDE_HOST:
            (kind,) = [each for each in proto.message_type if each.name == "OverrideHost"]
            assert all(each.name != "selected_host_key" for each in kind.field), "now it is known: this can go"
            new = kind.field.add(name="selected_host_key", json_name="selectedHostKey", number=2)
            new.type, new.label = FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.LABEL_OPTIONAL
            new.type_name = ".envoy.type.metadata.v3.MetadataKey"
        pool.Add(proto)

    for name in (
        "envoy.config.bootstrap.v3.Bootstrap",
        "envoy.extensions.access_loggers.file.v3.FileAccessLog",
        "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter",
        "envoy.extensions.filters.http.cors.v3.Cors",
        "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "envoy.extensions.filters.http.fault.v3.HTTPFault",
        "envoy.extensions.filters.http.grpc_stats.v3.FilterConfig",
        "envoy.extensions.filters.http.rbac.v3.RBAC",
        "envoy.extensions.filters.http.router.v3.Router",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        "envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest",
        "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin",
        "envoy.extensions.load_balancing_policies.subset.v3.Subset",
        "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
    ):
        add(default.FindMessageTypeByName(name).file)
    pool.Add(_filter_chain())
    return pool


_POOL = _with_newer_fields()


def message(kind: str, content: dict[str, Any]) -> Any:
    """JSON, in the spelling of Go or of the API -> message. Raises json_format.ParseError for what Envoy does not know."""
    empty = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(kind))()
    return json_format.ParseDict(content, empty, descriptor_pool=_POOL)


def content(of: Message) -> dict[str, Any]:
    """The other way, in the spelling of the API."""
    return json_format.MessageToDict(of, preserving_proto_field_name=True, descriptor_pool=_POOL)


def merge(into: Message, patch: Message) -> None:
    """As Istio merges: like protobuf, so lists grow; but a duration is replaced, and what an Any holds is merged."""
    for field, value in patch.ListFields():
        if field.message_type is None or _repeated(field):
            _append_or_set(into, field, value)
            continue
        target = getattr(into, field.name)
        kind = field.message_type.full_name
        if kind == "google.protobuf.Duration":
            target.CopyFrom(value)
        elif kind == "google.protobuf.Any" and target.type_url == value.type_url:
            merge_any(target, value)
        elif kind == "google.protobuf.Any":
            target.CopyFrom(value)
        else:
            target.SetInParent()
            merge(target, value)


def merge_any(into: Any, patch: Any) -> None:
    """Both hold the same type."""
    target = unpacked(into)
    merge(target, unpacked(patch))
    pack(into, target)


def unpacked(packed: Any) -> Any:
    """What an Any holds."""
    found = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(packed.type_url.removeprefix(TYPES)))()
    found.ParseFromString(packed.value)
    return found


def pack(into: Any, held: Message) -> None:
    """The other way."""
    into.type_url, into.value = TYPES + held.DESCRIPTOR.full_name, held.SerializeToString()


def _append_or_set(into: Message, field: FieldDescriptor, value: Any) -> None:
    if not _repeated(field):
        setattr(into, field.name, value)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        target = getattr(into, field.name)
        for key in value:
            if field.message_type.fields_by_name["value"].message_type is None:
                target[key] = value[key]
            else:
                target[key].CopyFrom(value[key])
    else:
        getattr(into, field.name).extend(value)


def _repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)
