# A vLLM worker (P or D) on NVIDIA GPUs with kvloop's launcher, plugin and guard.
#   docker build -f deploy/docker/worker.Dockerfile -t kvloop-worker .
# Written from vLLM's sources; nobody has built it on a machine with a GPU yet.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY extproc extproc
COPY workers workers
COPY bench bench
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${VLLM_IMAGE}
COPY --from=build /wheels /wheels
# vLLM's own packages stay as they are: pip fails here rather than replace one of them.
RUN python3 -m pip freeze --exclude-editable > /wheels/vllm-constraints.txt \
    && python3 -m pip install --no-cache-dir --break-system-packages \
        --constraint /wheels/vllm-constraints.txt /wheels/kvloop-*.whl 'nixl>=1.5' \
    && useradd --uid 65532 --create-home kvloop \
    && install --directory --owner=kvloop /cache
# Weights and compiled kernels go below the home directory: mount volumes there and at /tmp, the rest may be read-only.
ENV HOME=/cache \
    PYTHONDONTWRITEBYTECODE=1 \
    VLLM_NO_USAGE_STATS=1
USER 65532:65532
VOLUME /cache
EXPOSE 8100 8200 5600 5700
# Minutes pass before the weights are read. One of the two ports is this worker's.
HEALTHCHECK --interval=15s --timeout=10s --start-period=20m --retries=4 \
    CMD ["sh", "-c", "curl -fsS http://127.0.0.1:8100/health || curl -fsS http://127.0.0.1:8200/health"]
ENTRYPOINT ["kvloop", "worker"]
CMD ["--help"]
