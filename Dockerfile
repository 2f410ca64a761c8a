# The exporter as an image. Any builder will do: docker build -t vllm-preemption-exporter .
# One base for both stages: the environment that the first one makes is moved to the second as it is.
FROM python:3.13.12-slim-trixie AS base

FROM base AS build
WORKDIR /src
# What builds lives in an environment of its own, which stays behind. Both are filled from locks with hashes, and from
# wheels only: nothing is compiled. They are a layer of their own, for they change less often than the program.
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
COPY --from=build /opt/exporter /opt/exporter
# A number, so that Kubernetes can see that it is not root (runAsNonRoot) without reading /etc/passwd.
USER 65532:65532
EXPOSE 21900
# No shell in between: SIGTERM reaches the exporter itself. It writes no file, so the root may be read-only.
ENTRYPOINT ["/opt/exporter/bin/vllm-preemption-exporter"]
