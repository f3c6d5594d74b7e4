"""Build the Envoy bootstrap kvloop runs behind, out of Envoy's own message types.

``render`` is pure: settings in, YAML out, the same text every time. A misspelt field is a ``TypeError`` here and not a
surprise in production. Why each setting is what it is stands in ``envoy/README.md``; the comments below only say what
would break.

Rules that must stay true:

* No route and no cluster retries a request: a replayed body would use a handle twice.
* Every path a worker would take for a handled one goes through ext_proc or is refused.
* Headers that steer kvloop, Envoy or a worker's rank never come from a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

import yaml
from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.bootstrap import v3 as boot
from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.config.overload import v3 as overload
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.config.trace import v3 as trace
from envoy_data_plane.envoy.extensions.access_loggers.file import v3 as file_log
from envoy_data_plane.envoy.extensions.access_loggers.stream import v3 as stream_log
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.header_mutation import v3 as header_mutation
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec import v3 as upstream_codec
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import v3 as least_request
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections import v3 as downstream
from envoy_data_plane.envoy.extensions.resource_monitors.fixed_heap import v3 as fixed_heap
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream_http
from envoy_data_plane.envoy.type import v3 as http_type
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any as Packed
from envoy_data_plane.google.protobuf import Struct

from extproc import headers
from extproc.endpoints import ENDPOINTS
from extproc.envoy_tls import client_socket, server_socket
from extproc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extproc.settings import EnvoySettings

EXT_PROC_FILTER: Final = "kvloop.ext_proc"
"""Its own name, because per-route settings are looked up by it: another ext_proc in the chain must not share them."""

EXT_PROC_CLUSTER: Final = "kvloop_extproc"
PREFILL_CLUSTER: Final = "prefill"
PREFILL_BY_CONVERSATION_CLUSTER: Final = "prefill_by_conversation"
DECODE_CLUSTER: Final = "decode"
COLLECTOR_CLUSTER: Final = "otlp_collector"

STEERING_HEADERS: Final = (
    headers.DATA_PARALLEL_RANK,
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-served",
)
"""Exact names dropped from clients besides the prefixes: a rank, and the endpoint overrides of inference gateways."""

STEERING_PREFIXES: Final = ("x-envoy-",)
"""``x-envoy-retry-on`` and its like would switch on the retries this file leaves out. Envoy drops them by itself from
clients it holds for external; this does not hang on whom a later ``internal_address_config`` names."""

KIBIBYTE: Final = 1024
STREAM_BUFFER_BYTES: Final = 1024 * KIBIBYTE
CONNECTION_WINDOW_BYTES: Final = 16 * STREAM_BUFFER_BYTES
UNLIMITED: Final = 1_000_000
"""Above anything a process has file descriptors for; Envoy's own default of 1024 would limit concurrent answers."""

ENCODED_CONTROL_CHARACTER: Final = ".*%(?:[01][0-9a-fA-F]|7[fF]).*"

NO_LIMIT: Final = timedelta(0)
MAX_HEADERS: Final = 100
HEAP_MONITOR: Final = "envoy.resource_monitors.fixed_heap"

HEADER = "# Written by `kvloop envoy render`; change the settings, not this file. Reasons: envoy/README.md.\n"


def render(settings: EnvoySettings) -> str:
    """Return the bootstrap as YAML, field names as Envoy's documentation spells them, ready for ``envoy -c``.

    Raises ``ConfigError`` for an address Envoy could not use.
    """
    as_json = bootstrap(settings).to_dict(casing=_as_spelt)  # type: ignore[arg-type] # any callable will do
    return HEADER + yaml.safe_dump(as_json, sort_keys=False, width=110, allow_unicode=True)


def _as_spelt(field: str) -> str:
    """Keep the proto's own spelling: betterproto2's snake case makes ``consecutive_5_xx`` of ``consecutive_5xx``."""
    return field


def bootstrap(settings: EnvoySettings) -> boot.Bootstrap:
    """Return the whole bootstrap: listeners, clusters, a private admin interface, overload limits."""
    topology = _gateway(settings) if settings.topology == "gateway" else _intercept(settings)
    return boot.Bootstrap(
        admin=boot.Admin(address=_bind_address(settings.admin_listen), ignore_global_conn_limit=True),
        static_resources=boot.BootstrapStaticResources(
            listeners=[
                *(_watched_listener(face, settings) for face in topology.faces),
                _prefill_listener(topology, settings),
            ],
            clusters=[
                _ext_proc_cluster(settings),
                _prefill_cluster(PREFILL_CLUSTER, settings.prefill, settings),
                *topology.clusters,
                *([] if settings.otlp is None else [_collector_cluster(settings.otlp)]),
            ],
        ),
        overload_manager=_overload_manager(settings),
    )


def _overload_manager(settings: EnvoySettings) -> overload.OverloadManager:
    """Refuse what would cost the running answers their memory: connections first, then requests."""
    connections = downstream.DownstreamConnectionsConfig(
        max_active_downstream_connections=settings.max_client_connections
    )
    return overload.OverloadManager(
        refresh_interval=timedelta(seconds=0.25),
        resource_monitors=[
            overload.ResourceMonitor(
                name="envoy.resource_monitors.global_downstream_max_connections", typed_config=Packed.pack(connections)
            ),
            overload.ResourceMonitor(
                name=HEAP_MONITOR,
                typed_config=Packed.pack(fixed_heap.FixedHeapConfig(max_heap_size_bytes=settings.max_heap_bytes)),
            ),
        ],
        actions=[
            _at_heap_share("envoy.overload_actions.shrink_heap", 0.9),
            _at_heap_share("envoy.overload_actions.stop_accepting_requests", 0.95),
        ],
    )


def _at_heap_share(action: str, share: float) -> overload.OverloadAction:
    threshold = overload.ThresholdTrigger(value=share)
    return overload.OverloadAction(name=action, triggers=[overload.Trigger(name=HEAP_MONITOR, threshold=threshold)])


# --- topologies -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Face:
    """A listener whose handled paths pass through ext_proc in ``role``, on to ``cluster``.

    ``worker``: the cluster of the one P this listener stands for, to which ext_proc's own calls shall go as well.
    """

    name: str
    address: str
    role: str
    cluster: str
    worker: str = ""

    @property
    def is_edge(self) -> bool:
        """Whether clients connect here, and not an orchestrator, whose word counts."""
        return self.role == "gateway"


@dataclass(frozen=True, slots=True)
class Topology:
    """What differs: who is faced, and which clusters there are besides ext_proc's and the P pool.

    ``has_affinity``: whether our legs of a conversation go to the P it hashes to.
    """

    faces: Sequence[Face]
    clusters: Sequence[cluster.Cluster]
    has_affinity: bool = False


def _gateway(settings: EnvoySettings) -> Topology:
    face = Face("main", settings.listen, "gateway", DECODE_CLUSTER)
    clusters = [_decode_cluster(DECODE_CLUSTER, settings.decode, settings)]
    if settings.prefill_affinity:
        by_conversation = _worker_cluster(
            PREFILL_BY_CONVERSATION_CLUSTER, settings.prefill, settings.max_prefill_requests, settings
        )
        clusters.insert(0, _by_hash(by_conversation, settings.prefill_hash_balance_factor))
    return Topology([face], clusters, has_affinity=settings.prefill_affinity)


def _intercept(settings: EnvoySettings) -> Topology:
    """Stand between an orchestrator and its workers: a listener per pool, or one per worker where it chooses itself."""
    faces: list[Face] = []
    clusters = []
    for role, pool, listens, workers, build in (
        ("prefill", PREFILL_CLUSTER, settings.intercept_prefill, settings.prefill, _prefill_cluster),
        ("decode", DECODE_CLUSTER, settings.intercept_decode, settings.decode, _decode_cluster),
    ):
        if len(listens) == 1:
            faces.append(Face(f"intercept_{role}", listens[0], role, pool))
            if role == "decode":
                clusters.append(build(pool, workers, settings))
            continue
        if len(listens) != len(workers):
            raise ConfigError(
                f"--intercept-{role} has {len(listens)} addresses for {len(workers)} workers:"
                " give one for the whole pool, or one for each worker"
            )
        for number, (address, worker) in enumerate(zip(listens, workers, strict=True)):
            name = f"{pool}_{number}"
            faces.append(Face(f"intercept_{name}", address, role, name, name if role == "prefill" else ""))
            clusters.append(build(name, [worker], settings))
    return Topology(faces, clusters)


# --- listeners ------------------------------------------------------------------------------------------------------


def _watched_listener(face: Face, settings: EnvoySettings) -> listener.Listener:
    """Strip what steers, route, watch the handled paths, answer errors as OpenAI's SDKs expect."""
    manager = hcm.HttpConnectionManager(
        stat_prefix=face.name,
        # As an edge: the client's address is the connection's, and its x-request-id is replaced, so that nobody
        # chooses the request ids a worker works with. An orchestrator's are kept: P and D find each other by them.
        use_remote_address=True,
        always_set_request_id_in_response=face.is_edge,
        preserve_external_request_id=not face.is_edge,
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=hcm.HttpConnectionManagerPathWithEscapedSlashesAction.REJECT_REQUEST,
        early_header_mutation_extensions=[
            core.TypedExtensionConfig(
                name="envoy.http.early_header_mutation.header_mutation",
                typed_config=Packed.pack(early.HeaderMutation(mutations=_drop_steering_headers(face))),
            )
        ],
        upgrade_configs=[hcm.HttpConnectionManagerUpgradeConfig(upgrade_type="websocket")],
        access_log=[_access_log(settings, {"listener": face.name, **LOG_FIELDS, **MAIN_LOG_FIELDS})],
        local_reply_config=_errors(_verbatim()),
        route_config=route.RouteConfiguration(
            name=face.name,
            virtual_hosts=[route.VirtualHost(name=face.name, domains=["*"], routes=_watched_routes(face, settings))],
        ),
        http_filters=[
            hcm.HttpFilter(
                name=EXT_PROC_FILTER,
                # On the handled routes alone. Anywhere else Envoy's own answers to what it cannot even route (too many
                # headers, say) would wait for ext_proc, and be lost with the connection that Envoy closes meanwhile.
                disabled=True,
                typed_config=Packed.pack(_ext_proc_filter()),
            )
        ],
    )
    # A client that trickles its body in keeps a place that others could have.
    manager.request_timeout = timedelta(seconds=settings.upload_timeout_seconds)
    tls = server_socket(settings.certificate_file, settings.key_file, None)
    return _listener(face.name, face.address, _with_common_options(manager, settings), tls)


def _prefill_listener(topology: Topology, settings: EnvoySettings) -> listener.Listener:
    """Balance ext_proc's own legs over the P pool, or send them where they must go, and say which worker answered."""
    particular = [
        _own_leg_route(
            face.worker,
            [route.HeaderMatcher(name=headers.WORKER, string_match=matcher.StringMatcher(exact=face.worker))],
        )
        for face in topology.faces
        if face.worker
    ]
    if topology.has_affinity:
        in_conversation = route.HeaderMatcher(name=headers.CONVERSATION, present_match=True)
        particular.append(_own_leg_route(PREFILL_BY_CONVERSATION_CLUSTER, [in_conversation], [_hash_of_conversation()]))
    manager = hcm.HttpConnectionManager(
        stat_prefix="prefill",
        access_log=[_access_log(settings, {"listener": "prefill", **LOG_FIELDS, **PREFILL_LOG_FIELDS})],
        local_reply_config=_errors(),
        route_config=route.RouteConfiguration(
            name="prefill",
            virtual_hosts=[
                route.VirtualHost(name="prefill", domains=["*"], routes=[*particular, _own_leg_route(PREFILL_CLUSTER)])
            ],
        ),
    )
    tls = server_socket(settings.prefill_certificate_file, settings.prefill_key_file, settings.prefill_client_ca_file)
    built = _listener("prefill", settings.prefill_listen, _with_common_options(manager, settings), tls)
    # Clients that fill the connection limit must not keep running turns from their prefill leg.
    built.ignore_global_conn_limit = True
    return built


def _own_leg_route(
    name: str, match: Sequence[route.HeaderMatcher] = (), hash_policy: Sequence[route.RouteActionHashPolicy] = ()
) -> route.Route:
    return route.Route(
        name=name,
        match=route.RouteMatch(prefix="/", headers=list(match)),
        route=route.RouteAction(cluster=name, timeout=NO_LIMIT, hash_policy=list(hash_policy)),
        response_headers_to_add=[_set_header(headers.UPSTREAM, "%UPSTREAM_REMOTE_ADDRESS%")],
    )


def _hash_of_conversation() -> route.RouteActionHashPolicy:
    return route.RouteActionHashPolicy(
        header=route.RouteActionHashPolicyHeader(header_name=headers.CONVERSATION), terminal=True
    )


def _listener(
    name: str, address: str, manager: hcm.HttpConnectionManager, tls: core.TransportSocket | None
) -> listener.Listener:
    return listener.Listener(
        name=name,
        address=_bind_address(address),
        per_connection_buffer_limit_bytes=STREAM_BUFFER_BYTES,
        filter_chains=[
            listener.FilterChain(
                transport_socket=tls,
                filters=[
                    listener.Filter(
                        name="envoy.filters.network.http_connection_manager", typed_config=Packed.pack(manager)
                    )
                ],
            )
        ],
    )


def _with_common_options(manager: hcm.HttpConnectionManager, settings: EnvoySettings) -> hcm.HttpConnectionManager:
    """Set what both listeners share: protocols, timeouts, and the router at the end of the chain."""
    manager.codec_type = hcm.HttpConnectionManagerCodecType.AUTO
    manager.max_request_headers_kb = settings.max_header_kilobytes
    manager.request_headers_timeout = timedelta(seconds=10)
    manager.stream_idle_timeout = timedelta(seconds=settings.stream_idle_timeout_seconds)
    manager.common_http_protocol_options = core.HttpProtocolOptions(
        idle_timeout=timedelta(hours=1),
        max_headers_count=MAX_HEADERS,
        # Some agents name their session header with an underscore. ASGI servers keep such names apart from their
        # dashed twins, so nothing can be smuggled by them.
        headers_with_underscores_action=core.HttpProtocolOptionsHeadersWithUnderscoresAction.ALLOW,
    )
    manager.http2_protocol_options = core.Http2ProtocolOptions(
        max_concurrent_streams=1000,
        initial_stream_window_size=STREAM_BUFFER_BYTES,
        initial_connection_window_size=CONNECTION_WINDOW_BYTES,
        allow_connect=True,  # websockets over HTTP/2
    )
    manager.tracing = _tracing(settings)
    manager.http_filters.append(
        hcm.HttpFilter(
            name="envoy.filters.http.router", typed_config=Packed.pack(router.Router(suppress_envoy_headers=True))
        )
    )
    return manager


def _tracing(settings: EnvoySettings) -> hcm.HttpConnectionManagerTracing | None:
    """Send Envoy's own spans to an OTLP collector. kvloop's spans join them: see docs/observability.md."""
    if settings.otlp is None:
        return None
    service = core.GrpcService(
        envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=COLLECTOR_CLUSTER), timeout=timedelta(seconds=1)
    )
    provider = trace.OpenTelemetryConfig(grpc_service=service, service_name="envoy")
    return hcm.HttpConnectionManagerTracing(
        provider=trace.TracingHttp(name="envoy.tracers.opentelemetry", typed_config=Packed.pack(provider)),
        random_sampling=http_type.Percent(value=settings.otlp_sample_percent),
        # Without it a worker's spans would hang on Envoy's span of the whole request.
        spawn_upstream_span=True,
    )


def _drop_steering_headers(face: Face) -> list[mutation.HeaderMutation]:
    # To choose a worker and its rank is an orchestrator's trade.
    exact = [mutation.HeaderMutation(remove=name) for name in STEERING_HEADERS if face.is_edge]
    return [
        _drop_regex(_below_but(headers.INTERNAL_PREFIX, headers.END)),
        *map(_drop_prefix, STEERING_PREFIXES),
        *exact,
    ]


def _below_but(prefix: str, name: str) -> str:
    """Return a pattern for every name below ``prefix`` but ``name``: RE2 cannot say "not", so it lists the ways to differ."""
    tail = name.removeprefix(prefix)
    differing = [f"{tail[:index]}([^{letter}].*)?" for index, letter in enumerate(tail)]
    return f"{prefix}({'|'.join(differing)}|{tail}.+)"


def _drop_regex(pattern: str) -> mutation.HeaderMutation:
    return mutation.HeaderMutation(
        remove_on_match=mutation.HeaderMutationRemoveOnMatch(
            key_matcher=matcher.StringMatcher(safe_regex=matcher.RegexMatcher(regex=pattern))
        )
    )


def _drop_prefix(prefix: str) -> mutation.HeaderMutation:
    return mutation.HeaderMutation(
        remove_on_match=mutation.HeaderMutationRemoveOnMatch(key_matcher=matcher.StringMatcher(prefix=prefix))
    )


def _set_header(name: str, value: str) -> core.HeaderValueOption:
    return core.HeaderValueOption(
        header=core.HeaderValue(key=name, value=value),
        append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


# --- routes ---------------------------------------------------------------------------------------------------------


def _watched_routes(face: Face, settings: EnvoySettings) -> list[route.Route]:
    """List the handled paths, then those that would sneak past them, then everything else untouched."""
    return [
        *(_handled_route(handled.path, face) for handled in ENDPOINTS),
        *(_refused_route(route.RouteMatch(path=path)) for path in settings.refused_paths),
        # Envoy's normalisation has decoded every letter and digit by now and refused encoded slashes. What is left is a
        # newline: Starlette's patterns end in `$`, which matches in front of one, so a worker would take
        # /v1/completions%0A for /v1/completions.
        _refused_route(route.RouteMatch(safe_regex=matcher.RegexMatcher(regex=ENCODED_CONTROL_CHARACTER))),
        route.Route(
            name="untouched",
            match=route.RouteMatch(prefix="/"),
            route=route.RouteAction(cluster=face.cluster, timeout=NO_LIMIT),
            typed_per_filter_config={EXT_PROC_FILTER: Packed.pack(ext_proc.ExtProcPerRoute(disabled=True))},
        ),
    ]


def _refused_route(match: route.RouteMatch) -> route.Route:
    return route.Route(
        name="refused",
        match=match,
        direct_response=route.DirectResponseAction(
            status=404, body=core.DataSource(inline_string="This path is not served here.")
        ),
        typed_per_filter_config={EXT_PROC_FILTER: Packed.pack(ext_proc.ExtProcPerRoute(disabled=True))},
    )


def _handled_route(path: str, face: Face) -> route.Route:
    """Watch a path in full duplex on the way in, chunk by chunk on the way out.

    Full duplex stands here and not in the filter: there it would make Envoy ignore the mode overrides by which ext_proc
    leaves a response it has no use for.
    """
    send, skip = ext_proc.ProcessingModeHeaderSendMode.SEND, ext_proc.ProcessingModeHeaderSendMode.SKIP
    watched = ext_proc.ExtProcPerRoute(
        overrides=ext_proc.ExtProcOverrides(
            grpc_initial_metadata=[
                core.HeaderValue(key=headers.ROLE, value=face.role),
                *([core.HeaderValue(key=headers.WORKER, value=face.worker)] if face.worker else ()),
            ],
            processing_mode=ext_proc.ProcessingMode(
                request_header_mode=send,
                request_body_mode=ext_proc.ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED,
                request_trailer_mode=send,  # full duplex loses the body of a trailered request without it
                response_header_mode=send,
                response_body_mode=ext_proc.ProcessingModeBodySendMode.STREAMED,
                response_trailer_mode=skip,
            ),
        )
    )
    return route.Route(
        name=path,
        match=route.RouteMatch(path=path),
        route=route.RouteAction(
            cluster=face.cluster,
            timeout=NO_LIMIT,
            hash_policy=[_hash_of_conversation()],
            # An upgraded connection carries no body ext_proc could read.
            upgrade_configs=[route.RouteActionUpgradeConfig(upgrade_type="websocket", enabled=False)],
        ),
        typed_per_filter_config={EXT_PROC_FILTER: Packed.pack(watched)},
    )


# --- the ext_proc filter --------------------------------------------------------------------------------------------


def _ext_proc_filter() -> ext_proc.ExternalProcessor:
    return ext_proc.ExternalProcessor(
        stat_prefix="kvloop",
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=EXT_PROC_CLUSTER),
            # A retry replays the request to another replica, if it fits Envoy's 64 KiB replay buffer. That cannot use a
            # handle twice: the replica that died took it out of the store, the next one finds none and goes cold.
            retry_policy=core.RetryPolicy(
                retry_on="connect-failure,reset,unavailable",
                num_retries=2,
                retry_back_off=core.BackoffStrategy(
                    base_interval=timedelta(milliseconds=20), max_interval=timedelta(milliseconds=200)
                ),
                retry_host_predicate=[
                    core.RetryPolicyRetryHostPredicate(
                        name="envoy.retry_host_predicates.previous_hosts",
                        typed_config=Packed.pack(previous_hosts.PreviousHostsPredicate()),
                    )
                ],
                host_selection_retry_max_attempts=3,
            ),
        ),
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=ext_proc.ProcessingModeHeaderSendMode.SEND,
            response_header_mode=ext_proc.ProcessingModeHeaderSendMode.SEND,
        ),
        allow_mode_override=True,
        route_cache_action=ext_proc.ExternalProcessorRouteCacheAction.RETAIN,
        message_timeout=timedelta(seconds=5),
        # Closed on purpose: an unwatched request could carry a client's own kv_transfer_params.
        failure_mode_allow=False,
        status_on_error=http_type.HttpStatus(code=http_type.StatusCode.ServiceUnavailable),
        metadata_options=ext_proc.MetadataOptions(
            receiving_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(untyped=[headers.METADATA_NAMESPACE])
        ),
        request_attributes=["request.id"],
        response_attributes=["upstream.address", "upstream.request_attempt_count", "response.code"],
    )


# --- clusters -------------------------------------------------------------------------------------------------------


def _ext_proc_cluster(settings: EnvoySettings) -> cluster.Cluster:
    """Reach the ext_proc replicas: gRPC, and no more than a second behind their health."""
    # Not limited here: what ext_proc has no room for it refuses in words.
    built = _cluster(EXT_PROC_CLUSTER, settings.extproc, UNLIMITED)
    # In turns, so that a retry meets another replica. The least busy one would often be the one that just lost its
    # streams.
    built.lb_policy = cluster.ClusterLbPolicy.ROUND_ROBIN
    built.transport_socket = client_socket(
        settings.extproc_ca_file,
        settings.extproc_certificate_file,
        settings.extproc_key_file,
        settings.extproc_server_name,
        alpn="h2",
    )
    built.health_checks = [
        core.HealthCheck(
            interval=timedelta(seconds=1),
            # Envoy looks once a minute at a cluster nobody has used yet: a replica that starts after Envoy would
            # stay out for that long. Replicas say they serve once they reach Envoy's prefill listener: soon after.
            no_traffic_interval=timedelta(seconds=0.25),
            no_traffic_healthy_interval=timedelta(seconds=1),
            timeout=timedelta(seconds=2),
            unhealthy_threshold=2,
            healthy_threshold=1,
            grpc_health_check=core.HealthCheckGrpcHealthCheck(),
        )
    ]
    built.typed_extension_protocol_options = _http2_options()
    return built


def _collector_cluster(address: str) -> cluster.Cluster:
    """Reach the collector of traces."""
    built = _cluster(COLLECTOR_CLUSTER, [address], UNLIMITED)
    built.typed_extension_protocol_options = _http2_options()
    return built


def _http2_options() -> dict[str, Packed]:
    http2 = core.Http2ProtocolOptions(
        max_concurrent_streams=1000,
        initial_stream_window_size=STREAM_BUFFER_BYTES,
        initial_connection_window_size=CONNECTION_WINDOW_BYTES,
    )
    only = upstream_http.HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=http2)
    return _http_options(upstream_http.HttpProtocolOptions(explicit_http_config=only))


def _prefill_cluster(name: str, addresses: Sequence[str], settings: EnvoySettings) -> cluster.Cluster:
    built = _worker_cluster(name, addresses, settings.max_prefill_requests, settings)
    built.load_balancing_policy = _least_request()
    return built


def _least_request() -> cluster.LoadBalancingPolicy:
    """Choose the least busy of all.

    Envoy's default compares two hosts drawn at random, which in a pool of two takes the busier one every fourth time.
    """
    policy = least_request.LeastRequest(selection_method=least_request.LeastRequestSelectionMethod.FULL_SCAN)
    return cluster.LoadBalancingPolicy(
        policies=[
            cluster.LoadBalancingPolicyPolicy(
                typed_extension_config=core.TypedExtensionConfig(
                    name="envoy.load_balancing_policies.least_request", typed_config=Packed.pack(policy)
                )
            )
        ]
    )


def _decode_cluster(name: str, addresses: Sequence[str], settings: EnvoySettings) -> cluster.Cluster:
    return _by_hash(
        _worker_cluster(name, addresses, settings.max_decode_requests, settings), settings.hash_balance_factor
    )


def _by_hash(built: cluster.Cluster, balance_factor: int) -> cluster.Cluster:
    """Choose by the route's hash policy, unless that worker has more than its share of the load."""
    built.lb_policy = cluster.ClusterLbPolicy.MAGLEV
    built.common_lb_config = _common_lb_config(
        cluster.ClusterCommonLbConfigConsistentHashingLbConfig(
            # By address: all pods behind one headless Service share a hostname.
            use_hostname_for_hashing=False,
            hash_balance_factor=balance_factor,
        )
    )
    return built


def _worker_cluster(name: str, addresses: Sequence[str], max_requests: int, settings: EnvoySettings) -> cluster.Cluster:
    """Reach vLLM: HTTP/1.1, probed on /health, set aside for gateway failures only."""
    built = _cluster(name, addresses, max_requests)
    built.transport_socket = client_socket(
        settings.worker_ca_file,
        settings.worker_certificate_file,
        settings.worker_key_file,
        settings.worker_server_name,
        alpn="http/1.1",
    )
    built.health_checks = [
        core.HealthCheck(
            interval=timedelta(seconds=settings.health_interval_seconds),
            no_traffic_interval=timedelta(seconds=settings.health_interval_seconds),
            timeout=timedelta(seconds=settings.health_timeout_seconds),
            unhealthy_threshold=3,
            healthy_threshold=1,
            # A kept connection would race with the worker's own keep-alive timeout.
            reuse_connection=False,
            http_health_check=core.HealthCheckHttpHealthCheck(path="/health"),
        )
    ]
    built.outlier_detection = _outlier_detection()
    built.typed_extension_protocol_options = _http_options(
        upstream_http.HttpProtocolOptions(
            common_http_protocol_options=core.HttpProtocolOptions(
                idle_timeout=timedelta(seconds=settings.worker_idle_timeout_seconds)
            ),
            explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
                http_protocol_options=core.Http1ProtocolOptions()
            ),
            http_filters=_upstream_filters(),
        )
    )
    return built


def _upstream_filters() -> list[hcm.HttpFilter]:
    """Drop what a worker sends under our prefix.

    Not among the listener's filters: those would also drop the receipt of what ext_proc answers by itself.
    """
    drop = header_mutation.Mutations(response_mutations=[_drop_prefix(headers.INTERNAL_PREFIX)])
    return [
        hcm.HttpFilter(
            name="kvloop.drop_internal_response_headers",
            typed_config=Packed.pack(header_mutation.HeaderMutation(mutations=drop)),
        ),
        hcm.HttpFilter(
            name="envoy.filters.http.upstream_codec", typed_config=Packed.pack(upstream_codec.UpstreamCodec())
        ),
    ]


def _outlier_detection() -> cluster.OutlierDetection:
    """Eject for refused connections, resets and 502-504, never for a 500: a model may well answer a bad prompt so."""
    return cluster.OutlierDetection(
        interval=timedelta(seconds=5),
        base_ejection_time=timedelta(seconds=15),
        consecutive_gateway_failure=5,
        enforcing_consecutive_gateway_failure=100,
        enforcing_consecutive_5xx=0,
        enforcing_success_rate=0,
        enforcing_failure_percentage=0,
        max_ejection_percent=50,
        always_eject_one_host=False,
        # A worker can pass /health and still drop requests: its time out is served in full.
        successful_active_health_check_uneject_host=False,
    )


def _cluster(name: str, addresses: Sequence[str], max_requests: int) -> cluster.Cluster:
    """Return what all clusters share; a single hostname among ``addresses`` makes the cluster resolve names."""
    named = not all(_is_ip(_split(address)[0]) for address in addresses)
    kind = cluster.ClusterDiscoveryType.STRICT_DNS if named else cluster.ClusterDiscoveryType.STATIC
    return cluster.Cluster(
        name=name,
        type=kind,
        connect_timeout=timedelta(seconds=1),
        # Envoy prefers IPv6, and would ask [::1] for "localhost" although the worker listens on 127.0.0.1.
        dns_lookup_family=cluster.ClusterDnsLookupFamily.V4_PREFERRED,
        # A worker that left the name is leaving: it finishes what it has and gets nothing new.
        ignore_health_on_host_removal=True,
        per_connection_buffer_limit_bytes=STREAM_BUFFER_BYTES,
        load_assignment=endpoint.ClusterLoadAssignment(
            cluster_name=name,
            endpoints=[
                endpoint.LocalityLbEndpoints(
                    lb_endpoints=[
                        endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=_address(address)))
                        for address in addresses
                    ]
                )
            ],
        ),
        circuit_breakers=cluster.CircuitBreakers(
            thresholds=[
                cluster.CircuitBreakersThresholds(
                    max_connections=UNLIMITED,
                    max_pending_requests=max_requests,
                    max_requests=max_requests,
                    max_retries=UNLIMITED,
                )
            ]
        ),
        common_lb_config=_common_lb_config(),
        # Finds a peer that vanished without a FIN in about 45 s. HTTP/2 pings would do the same, but a gRPC server
        # takes pings on a quiet connection for abuse and closes it, held requests included.
        upstream_connection_options=cluster.UpstreamConnectionOptions(
            tcp_keepalive=core.TcpKeepalive(keepalive_time=30, keepalive_interval=5, keepalive_probes=3)
        ),
    )


def _common_lb_config(
    hashing: cluster.ClusterCommonLbConfigConsistentHashingLbConfig | None = None,
) -> cluster.ClusterCommonLbConfig:
    return cluster.ClusterCommonLbConfig(
        # No panic: when most of a pool is down, the healthy rest serves; dead hosts are not tried instead.
        healthy_panic_threshold=http_type.Percent(value=0.0),
        # At once, not up to a second later: nothing is retried, so each request to a dead host is lost.
        update_merge_window=NO_LIMIT,
        consistent_hashing_lb_config=hashing,
    )


def _http_options(options: upstream_http.HttpProtocolOptions) -> dict[str, Packed]:
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": Packed.pack(options)}


# --- what Envoy says by itself --------------------------------------------------------------------------------------


def _errors(*first: hcm.ResponseMapper) -> hcm.LocalReplyConfig:
    """Answer as OpenAI's SDKs parse errors, unless one of the mappers in ``first`` says otherwise."""
    unavailable = _error_mapper(
        503, "No worker or processor is available for this request. Try again.", "service_unavailable"
    )
    unavailable.headers_to_add = [_set_header("retry-after", "1")]
    return hcm.LocalReplyConfig(
        mappers=[
            *first,
            unavailable,
            _error_mapper(504, "The request was given up after its time limit.", "timeout"),
            _error_mapper(500, "The gateway failed on this request.", "gateway_error"),
        ],
        body_format=_error_format(
            "The gateway refused this request (%RESPONSE_CODE_DETAILS%). %LOCAL_REPLY_BODY%",
            "invalid_request_error",
            "refused_by_gateway",
        ),
    )


def _verbatim() -> hcm.ResponseMapper:
    """Leave alone what ext_proc answers by itself: it says so in its dynamic metadata."""
    return hcm.ResponseMapper(
        filter=accesslog.AccessLogFilter(
            metadata_filter=accesslog.MetadataFilter(
                matcher=matcher.MetadataMatcher(
                    filter=headers.METADATA_NAMESPACE,
                    path=[matcher.MetadataMatcherPathSegment(key=headers.VERBATIM)],
                    value=matcher.ValueMatcher(bool_match=True),
                ),
                match_if_key_not_found=False,
            )
        ),
        body_format_override=core.SubstitutionFormatString(
            text_format_source=core.DataSource(inline_string="%LOCAL_REPLY_BODY%"), content_type="application/json"
        ),
    )


def _error_mapper(status: int, message: str, code: str) -> hcm.ResponseMapper:
    """Map this status, or for 500 the whole rest of its class, to an error of kind ``server_error``."""
    op = accesslog.ComparisonFilterOp.GE if status == 500 else accesslog.ComparisonFilterOp.EQ  # noqa: PLR2004
    return hcm.ResponseMapper(
        filter=accesslog.AccessLogFilter(
            status_code_filter=accesslog.StatusCodeFilter(
                comparison=accesslog.ComparisonFilter(
                    op=op, value=core.RuntimeUInt32(default_value=status, runtime_key=f"kvloop.status_{status}")
                )
            )
        ),
        body_format_override=_error_format(message, "server_error", code),
    )


def _error_format(message: str, kind: str, code: str) -> core.SubstitutionFormatString:
    error = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return core.SubstitutionFormatString(json_format=Struct.from_dict(error), content_type="application/json")


# --- access log -----------------------------------------------------------------------------------------------------

LOG_FIELDS: Final = {
    "time": "%START_TIME%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",  # a query may carry names and keys
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "upstream": "%UPSTREAM_HOST%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "duration_ms": "%DURATION%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
}
MAIN_LOG_FIELDS: Final = {
    "protocol": "%PROTOCOL%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    "route": "%ROUTE_NAME%",
    "kvloop": f"%DYNAMIC_METADATA({headers.METADATA_NAMESPACE})%",
}
PREFILL_LOG_FIELDS: Final = {"leg": f"%REQ({headers.LEG})%"}


def _access_log(settings: EnvoySettings, fields: Mapping[str, str]) -> accesslog.AccessLog:
    """Log one JSON object per request: what happened, never what was said nor by which conversation."""
    log_format = core.SubstitutionFormatString(json_format=Struct.from_dict(dict(fields)))
    if settings.access_log == "/dev/stdout":
        # Not the file logger: it opens the path anew, which fails where stdout is a pipe of another user.
        return accesslog.AccessLog(
            name="envoy.access_loggers.stdout",
            typed_config=Packed.pack(stream_log.StdoutAccessLog(log_format=log_format)),
        )
    return accesslog.AccessLog(
        name="envoy.access_loggers.file",
        typed_config=Packed.pack(file_log.FileAccessLog(path=settings.access_log, log_format=log_format)),
    )


# --- addresses and JSON ---------------------------------------------------------------------------------------------


def _bind_address(text: str) -> core.Address:
    """Return an address to listen on; Envoy resolves no names there."""
    host, _ = _split(text)
    if not _is_ip(host):
        raise ConfigError(f"Envoy cannot listen on the name {host!r}: give an IP address, as in 127.0.0.1 or 0.0.0.0")
    return _address(text)


def _address(text: str) -> core.Address:
    host, port = _split(text)
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port))


def _split(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
