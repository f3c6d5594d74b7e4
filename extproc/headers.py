"""Every header and metadata name kvloop puts on the wire: who sets it, who reads it. One place, so none can drift."""

from typing import Final

CONVERSATION: Final = "x-kvloop-conversation"
"""Hash of the conversation key. Set by ext_proc on both legs, read by Envoy's hash policies to pick P and D."""

END: Final = "x-kvloop-end"
"""``true``: this turn ends the conversation, so nothing is kept of it. The one name of ours that clients may send."""

RECEIPT: Final = "x-kvloop-receipt"
"""What kvloop did for this request. Set by ext_proc on the response, read by clients and people."""

SECRET: Final = "x-kvloop-secret"  # noqa: S105 - a name, not a secret
"""The gateway's shared secret. Set by ext_proc on both legs, read (and required) by the guard on the workers."""

GUARD_CODE: Final = "kvloop_secret"
"""The error code of the guard's own 403, by which ext_proc tells it from vLLM's answers."""

LEG: Final = "x-kvloop-leg"
"""``render``, ``prefill`` or ``release``. Set by ext_proc on its own calls, read by Envoy's access log."""

UPSTREAM: Final = "x-kvloop-upstream"
"""``ip:port`` of the worker that answered. Set by Envoy's prefill listener, read by ext_proc; never reaches a client."""

INTERNAL_PREFIX: Final = "x-kvloop-"
"""Whatever a client sends under this prefix, ``END`` excepted, is dropped before ext_proc runs."""

ROLE: Final = "x-kvloop-role"
"""gRPC initial metadata, set per Envoy filter or route: ``gateway``, ``prefill`` or ``decode``, the role ext_proc plays."""

WORKER: Final = "x-kvloop-worker"
"""Cluster of the one worker a listener stands for. Set by Envoy in the gRPC initial metadata of that listener's streams;
ext_proc repeats it as a header of its own calls, by which Envoy's prefill listener sends them to that worker."""

METADATA_NAMESPACE: Final = "kvloop"
"""Namespace of the dynamic metadata ext_proc hands back to Envoy, read by the access log and local replies."""

VERBATIM: Final = "verbatim"
"""Key in that namespace: true beside an ImmediateResponse, whose body Envoy must then not reword."""

DATA_PARALLEL_RANK: Final = "x-data-parallel-rank"
"""vLLM obeys it; only the gateway may choose a rank, so a client's own is dropped."""
