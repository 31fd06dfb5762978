# manyhands on the CPU: docker build --tag manyhands .
# docs/containers.md has the commands, and what to change for GPUs.
FROM python:3.11-slim AS build
WORKDIR /source
COPY LICENSE README.md pyproject.toml ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
# An index with other builds of PyTorch, such as https://download.pytorch.org/whl/cu126, makes an image for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hosts,report
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" 'torch>=2.6,<2.14'
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/manyhands-*.whl)[$EXTRAS]"

# Caches of libraries go where any user may write, also when the root is read-only and /tmp a tmpfs.
ENV HOME=/tmp
RUN useradd --uid 1000 --no-create-home manyhands && install --directory --owner manyhands /training
USER manyhands
WORKDIR /training
ENTRYPOINT ["manyhands"]
