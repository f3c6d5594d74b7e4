#!/bin/bash
# Let Envoy finish: tell clients to come back elsewhere, then wait until no request runs (or for $1 seconds). At SIGTERM Envoy
# itself ends at once, with every answer it is streaming.
ask() {
    exec 3<>/dev/tcp/127.0.0.1/"${ADMIN_PORT:-9901}" || exit 0 # no Envoy, nothing to drain
    printf '%s %s HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n' "$1" "$2" >&3
    cat <&3
    exec 3<&-
}

ask POST '/drain_listeners?graceful&skip_exit' >/dev/null
sleep "${ENDPOINTS_SECONDS:-5}" # until no Service leads here any more
for ((waited = 0; waited < ${1:-600}; waited++)); do
    ask GET '/stats?filter=^http.(main|prefill).downstream_rq_active$' | grep -qE 'rq_active: [1-9]' || exit 0
    sleep 1
done
echo "requests still run after ${1:-600} s" >&2
exit 1
