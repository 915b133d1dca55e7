# syntax=docker/dockerfile:1
#
# Lacunar's image. Two variants from one file:
#
#   docker build -t lacunar:cpu --build-arg DEVICE=cpu .
#   docker build -t lacunar:gpu --build-arg DEVICE=gpu .
#
# BASE is any Debian with `python` >= 3.11, its venv module and headers; pin it by digest for a release:
# --build-arg BASE=python@sha256:... . The builder needs no vendor image: nvcc 13.0 comes from the Python
# registry. The runtime stage has no compiler, runs as an ordinary user (or any user of group 0) with a
# read-only root, and writes only below /var/cache/lacunar and /tmp. tests/deploy/image.sh builds and runs it.

ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS builder
ARG DEVICE=cpu
# The CPU build of torch is a tenth of the CUDA build's size; it lives on PyTorch's own index.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_VERSION=2.13.0
# What pip is asked for instead of the two above, e.g. where a mirror has another build.
ARG TORCH_REQUIREMENT=
ARG CUDA_ARCHITECTURES="80-real;86-real;89-real;90a-real;100-real;120"

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/lacunar
ENV PATH=/opt/lacunar/bin:$PATH

# The version is in the variable, where hadolint does not look.
# hadolint ignore=DL3013
RUN case "${DEVICE}" in \
      cpu) torch="torch==${TORCH_VERSION}+cpu" ;; \
      gpu) torch="torch==${TORCH_VERSION}"; TORCH_CPU_INDEX= ;; \
      *) echo "DEVICE is cpu or gpu, not '${DEVICE}'" >&2; exit 1 ;; \
    esac \
    && pip install ${TORCH_CPU_INDEX:+--extra-index-url "${TORCH_CPU_INDEX}"} "${TORCH_REQUIREMENT:-${torch}}"
# Build tools live apart from the environment that is shipped.
RUN pip install --target /opt/build scikit-build-core==1.0.* cmake==4.* ninja==1.* \
    && if [ "${DEVICE}" = gpu ]; then \
         pip install --target /opt/build 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' \
           'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*' \
         && find /opt/build/nvidia -path '*/bin/*' -type f -exec chmod +x {} +; \
       fi
ENV PATH=/opt/build/bin:/opt/build/nvidia/cu13/bin:$PATH

WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY kernels_ext kernels_ext
COPY service service
# The wheel is built with the build tools in sight and installed without: pip would take what lies there for
# installed, and the image would lack it.
RUN if [ "${DEVICE}" = gpu ]; then cuda=ON; else cuda=OFF; fi \
    && PYTHONPATH=/opt/build pip wheel --no-build-isolation --no-deps --wheel-dir /opt/wheel . \
         --config-settings "cmake.define.KERNELS_CUDA=${cuda}" \
         --config-settings "cmake.define.CMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}"
RUN pip install /opt/wheel/*.whl && pip check
# What is in the image, as a CycloneDX bill of materials; the tool that writes it is not.
RUN pip install --target /opt/sbom cyclonedx-bom==7.* \
    && PYTHONPATH=/opt/sbom python -m cyclonedx_py environment --output-reproducible \
         --output-file /opt/lacunar/sbom.cdx.json /opt/lacunar/bin/python


FROM ${BASE} AS runtime
LABEL org.opencontainers.image.title="lacunar" \
      org.opencontainers.image.description="A server for pruned language models" \
      org.opencontainers.image.licenses="Apache-2.0"

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --gid 0 --no-create-home --home-dir /var/cache/lacunar lacunar \
    && install --directory --owner=10001 --group=0 --mode=0770 /var/cache/lacunar /models

COPY --from=builder /opt/lacunar /opt/lacunar

ENV PATH=/opt/lacunar/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    XDG_CACHE_HOME=/var/cache/lacunar \
    LACUNAR_HOST=0.0.0.0 \
    LACUNAR_PORT=8000
USER 10001:0
WORKDIR /var/cache/lacunar
VOLUME ["/models"]
EXPOSE 8000
# Readiness needs the model; a large one takes its time to load.
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"LACUNAR_PORT\"]}/livez', timeout=2)"]
ENTRYPOINT ["tini", "--", "lacunar"]
CMD ["serve", "/models/model"]
