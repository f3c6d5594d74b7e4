# kvloop's ext_proc service, `kvloop envoy render` and the simulated workers: everything that needs no vLLM.
#   docker build -f deploy/docker/gateway.Dockerfile -t kvloop .
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python -m venv /venv
COPY pyproject.toml README.md LICENSE ./
COPY extproc extproc
COPY workers workers
COPY bench bench
# xds-protos brings an older copy of OpenTelemetry's messages to the same place: the last one installed is there.
RUN /venv/bin/python -m pip install --no-cache-dir '.[redis,otel,top]' \
    && /venv/bin/python -m pip install --no-cache-dir --force-reinstall --no-deps 'opentelemetry-proto>=1.30'

FROM ${PYTHON_IMAGE}
# Runs with a read-only root file system: nothing here is written to.
ENV PATH=/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    KVLOOP_LISTEN=0.0.0.0:50051 \
    KVLOOP_ADMIN_LISTEN=0.0.0.0:9464
COPY --from=build /venv /venv
# A fresh volume mounted here takes this owner: `kvloop envoy render` may write into it.
RUN install --directory --owner=65532 --group=65532 /config
USER 65532:65532
EXPOSE 50051 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
ENTRYPOINT ["kvloop"]
CMD ["serve"]
