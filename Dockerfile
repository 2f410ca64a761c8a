# Builds the exporter's image with any builder: docker build -t vllm-preemption-exporter .
# Both stages have the same base, because the second copies the environment of the first.
FROM python:3.13.16-slim-trixie@sha256:bf44cdfcb76cd3b41e879bc058fc37ec5872002ccfde7fcb765e218cde0cd79c AS base

FROM base AS build
WORKDIR /src
# The build tools have their own environment, which is not copied. Both come from locks with hashes, and from wheels
# only: nothing is compiled. They have their own layer, because they change less often than the program.
COPY requirements.lock requirements-build.lock ./
RUN python3 -m venv /opt/tools \
    && python3 -m venv --without-pip /opt/exporter \
    && /opt/tools/bin/pip install --no-cache-dir --only-binary :all: \
        --require-hashes --requirement requirements-build.lock \
    && /opt/tools/bin/pip --python /opt/exporter/bin/python install --no-cache-dir --only-binary :all: \
        --require-hashes --requirement requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY dashboards/ dashboards/
COPY exporter/ exporter/
RUN /opt/tools/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/tools/bin/pip --python /opt/exporter/bin/python install --no-cache-dir --no-deps --no-index /wheels/*.whl

FROM base
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="vllm-preemption-exporter" \
      org.opencontainers.image.description="Prometheus exporter and preemption alerting sidecar for vLLM" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/vllm-preemption-exporter/vllm-preemption-exporter"
# The base's pip, which nothing here runs.
RUN rm -rf /usr/local/lib/python3*/site-packages/pip* /usr/local/lib/python3*/ensurepip /usr/local/bin/pip*
COPY --from=build /opt/exporter /opt/exporter
# A number, so that Kubernetes can check runAsNonRoot without reading /etc/passwd.
USER 65532:65532
EXPOSE 21900
# Without a shell, so that SIGTERM reaches the exporter. It writes no files, so the root may be read-only.
ENTRYPOINT ["/opt/exporter/bin/vllm-preemption-exporter"]
