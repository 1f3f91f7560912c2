# An image that has the command `lrkv`, and the shipped configurations in its working directory.
#
#   docker build -t lrkv .                                     for CPUs
#   docker build -t lrkv --target cuda .                       for NVIDIA GPUs (CUDA 13)
#   docker build -t lrkv --target cuda --build-arg CUDA=cuda12 .
#
# The CUDA libraries come as Python packages; the host brings the driver and the container toolkit.
FROM python:3.12-slim AS source
WORKDIR /opt/lrkv
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs ./configs
COPY launch ./launch
COPY lrkv_jax ./lrkv_jax

FROM source AS cuda
ARG CUDA=cuda13
RUN pip install --no-cache-dir -c constraints.txt ".[${CUDA},serve]"
CMD ["lrkv", "--help"]

FROM source AS cpu
RUN pip install --no-cache-dir -c constraints.txt ".[serve]"
CMD ["lrkv", "--help"]
