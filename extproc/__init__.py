"""kvloop's ext_proc service: it carries a conversation's KV handle from one turn to the next, or refuses to.

Read the modules in this order to follow one request:

``settings`` → ``headers`` → ``events`` → ``errors`` → ``admission`` → ``endpoints`` → ``splice`` → ``request`` → ``identity`` →
``handle`` → ``proof`` → ``store`` → ``legs`` → ``sse`` → ``turn`` → ``receipt`` → ``exchange`` (the life of a request;
it is made of ``http_exchange``, ``attaching``, ``capturing`` and ``returning``), then the shells that do the work: ``wire``
(protobuf), ``http2`` and ``grpc_server`` (gRPC), ``stream``, ``gateway``, ``releases``, ``returns``, ``retention``,
``http_client``, ``workers_client``, ``metrics``, ``log``, ``tracing``, ``debug_state``, ``admin``, ``garbage``, ``server``, ``cli``.
A store that several processes share is ``store_format``, ``server_clock``, ``redis_link`` and ``redis_store``;
several processes on one port are ``processes``. ``kvloop doctor`` is ``doctor_findings``, ``doctor`` and ``doctor_store``.
``kvloop top`` stands beside it: ``top_picture``, ``top_screen``, ``top``.

Under somebody else's orchestrator the life of a request is ``intercept_prefill`` and ``intercept_decode``, with
``prompt_mark`` between them.
"""

__version__ = "0.1.0"
